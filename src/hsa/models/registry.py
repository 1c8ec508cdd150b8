"""Models by name: the ones of this library, and those that `hsa.baselines` and `hsa.research` plug in.

A *model*, as `hsa train --models` names it, is an architecture and what it changes in the options: "multiscale" is our
encoder with another kind of attention. An *architecture* is a family of configurations and its module; a saved model names
it. Plug-ins register both, with a hook each for a warm start and for an explanation, and nothing else has a case for them.

Importing this module does not import torch: entries are `"module:attribute"` strings until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hsa.errors import InvalidInput
from hsa.models.known_fields import known_fields
from hsa.registry import FUSIONS, Registry, resolve

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from hsa.models.causal_language_model import CausalLanguageModel
    from hsa.models.classifier import Classifier
    from hsa.models.options import ModelOptions
    from hsa.nn.embedding import Modality
    from hsa.tree.hierarchy import Hierarchy

Extra = Mapping[str, Any]
"""Options of plug-ins by the name of their group, such as {"documents": DocumentOptions(…)}; missing groups: defaults."""


class EncoderConfigLike(Protocol):
    """What the configuration of every encoder has. It is a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def width(self) -> int:
        """Size of the vectors."""

    @property
    def dropout(self) -> float:
        """Dropout of the encoder, and of the head."""

    @property
    def architecture(self) -> str:
        """Name in `ARCHITECTURES`."""

    @property
    def keeps_leaves(self) -> bool:
        """Whether the encoder returns a vector for every leaf of its input."""

    @property
    def has_fixed_size(self) -> bool:
        """Whether its size is that of a pre-trained encoder, so that it cannot be matched to another model's."""


@dataclass(frozen=True)
class Explanation:
    """How to draw what a model looked at in one example.

    Attributes:
        file: Name of the picture.
        leaves: Largest number of leaves that can be read in it.
        draw: `draw(path, model, example, labels, title)`.
        applies: Whether there is something to draw for this model.
    """

    file: str
    leaves: int
    draw: Callable[[Path, Classifier, Any, Any, str], None]
    applies: Callable[[Classifier], bool] = lambda model: True


@dataclass(frozen=True)
class Architecture:
    """A family of encoders that classifiers can have.

    Attributes:
        config: Dataclass of the sizes; its field `architecture` holds the name of this entry.
        encoder: Module, made as `encoder(config, modalities, kinds, keys)`. It maps `Inputs` to vectors and the forest whose
            leaves they are, and has `embedding` and `prepare(inputs)`.
        configure: `configure(options, extra, hierarchy, changes)`: the config for the options of a run, the trees of its
            data and the changes of a `Model`; raises `InvalidInput` where the trees lack a level that it needs.
        warm_start: `warm_start(encoder, load)` returns the parameters that the pre-trained weights named by the config set,
            if it names any, and loads these weights if asked to.
        tokenizer: `tokenizer(extra, say)`: the tokenizer that texts must be read with, or None; `say` is told what is loaded.
        explanation: `"module:attribute"` of an `Explanation`.
    """

    config: type[Any]
    encoder: type[nn.Module]
    configure: Callable[[ModelOptions, Extra, Hierarchy, Mapping[str, Any]], Any]
    warm_start: Callable[[nn.Module, bool], list[nn.Parameter]] | None = None
    tokenizer: Callable[[Extra, Callable[[str], None]], Any] | None = None
    explanation: str | None = None


@dataclass(frozen=True)
class Model:
    """An entry of `--models`.

    Attributes:
        architecture: Name in `ARCHITECTURES`.
        changes: Fields of its config that differ from what the options say.
        fuses: Whether NAME+FUSION makes sense: heads are fused as the options say.
    """

    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fuses: bool = True


ARCHITECTURES: Registry[Architecture] = Registry("architecture")
ARCHITECTURES.register("tree", "hsa.models.tree_encoder:TREE")

MODELS: Registry[Model] = Registry("models")
MODELS.register("hierarchical", Model("tree", {"kind": "hierarchical"}))
# Positions in the input: the kernels of multiscale attention take none in the logits.
MODELS.register("multiscale", Model("tree", {"kind": "multiscale", "position_input": True, "position_dim": 0}))
MODELS.register("clustered", Model("tree", {"kind": "clustered"}))
MODELS.register("bottom-up", Model("tree", {"kind": "bottom-up"}))
MODELS.register("flat", Model("tree", {"kind": "flat"}))


def find_model(name: str) -> Model:
    """Return the model of a name; NAME+FUSION is the model NAME with its heads fused in that way.

    >>> find_model("flat+talking").changes
    {'kind': 'flat', 'fusion': 'talking'}
    """
    base, plus, fusion = name.partition("+")
    model = MODELS.get(base)
    if not plus:
        return model
    if not model.fuses:
        raise InvalidInput("models", given=repr(name), expected=f"{base}: how its heads are fused is part of it")
    if fusion not in FUSIONS:
        raise InvalidInput("models", given=repr(name), expected=f"{base}+ and one of {', '.join(FUSIONS.names())}")
    return Model(model.architecture, {**model.changes, "fusion": fusion})


def configure(name: str, options: ModelOptions, extra: Extra, hierarchy: Hierarchy) -> EncoderConfigLike:
    """Return the encoder configuration of a model by its name, for documents with such trees.

    Raises:
        InvalidInput: An unknown name; trees that lack a level the model needs.
    """
    model = find_model(name)
    return ARCHITECTURES.get(model.architecture).configure(options, extra, hierarchy, model.changes)


def create(
    config: EncoderConfigLike, modalities: Mapping[str, Modality], kinds: Sequence[str], keys: Sequence[str]
) -> Any:
    """Build the encoder of a configuration, with new weights."""
    return ARCHITECTURES.get(config.architecture).encoder(config, modalities, kinds, keys)


def config_from_dict(data: Mapping[str, Any]) -> EncoderConfigLike:
    """Rebuild an encoder configuration from what `dataclasses.asdict` made of it."""
    given = dict(data)
    kind = ARCHITECTURES.get(given.pop("architecture")).config
    if "windows" in given:
        given["windows"] = tuple(given["windows"])
    return kind(**known_fields(kind, given))


def start_warm(encoder: nn.Module, *, load: bool = True) -> list[nn.Parameter]:
    """Return the parameters that the pre-trained weights of the encoder's configuration set, if it names any.

    Args:
        load: Load these weights; False where a checkpoint replaces them anyway.
    """
    hook = ARCHITECTURES.get(encoder.config.architecture).warm_start  # type: ignore[union-attr, arg-type]
    return [] if hook is None else hook(encoder, load)


def required_tokenizer(names: Iterable[str], extra: Extra, say: Callable[[str], None]) -> Any:
    """Return the tokenizer that one of the models must read texts with; None if none has one of its own."""
    for name in names:
        hook = ARCHITECTURES.get(find_model(name).architecture).tokenizer
        if hook is not None and (tokenizer := hook(extra, say)) is not None:
            return tokenizer
    return None


def explanation_of(model: Classifier) -> Explanation | None:
    """Return how to draw what a model looks at; None where there is nothing to draw."""
    where = ARCHITECTURES.get(model.config.encoder.architecture).explanation
    if where is None:
        return None
    explanation: Explanation = resolve(where)
    return explanation if explanation.applies(model) else None


@dataclass(frozen=True)
class LanguageArchitecture:
    """A family of language models.

    Attributes:
        config: Dataclass of the sizes, with `to_dict` and `from_dict`; its field `architecture` holds the name of this entry.
        module: `CausalLanguageModel` made from a config.
        configure: `"module:attribute"`: `configure(data, options, language, extra, changes)` returns the config for the
            options of a run.
        reader: `"module:attribute"` of the `Reader` that feeds texts to the model in training and evaluation.
        matched: Whether the width of the feed-forward networks is fitted to the parameters of our model.
    """

    config: type[Any]
    module: type[CausalLanguageModel]
    configure: str
    reader: str
    matched: bool = False


LANGUAGE_ARCHITECTURES: Registry[LanguageArchitecture] = Registry("architecture")
LANGUAGE_ARCHITECTURES.register("decoder", "hsa.models.language_model:DECODER")

LANGUAGE_MODELS: Registry[Model] = Registry("models")
for _name in ("multiscale", "clustered", "flat"):
    LANGUAGE_MODELS.register(_name, Model("decoder", {"attention": _name}))


def create_language_model(config: Any) -> CausalLanguageModel:
    """Build the language model of a configuration, with new weights."""
    return LANGUAGE_ARCHITECTURES.get(config.architecture).module(config)
