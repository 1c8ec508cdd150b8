"""Models by name: those of this library, and those that `hsa.baselines`, `hsa.research` and users register.

A *model*, as `hsa train --models` names it, is an architecture and the fields of its configuration that it changes. An
*architecture* is a configuration and the encoder that it describes, with optional hooks for a warm start, a tokenizer and an
explanation; the configuration of a saved model names it. No other code knows the architectures of plug-ins.

One line registers our encoder with other settings:

>>> from hsa.models.options import ModelOptions
>>> from hsa.nn.embedding import Modality
>>> from hsa.tree.hierarchy import Hierarchy
>>> MODELS.register("narrow", Model("tree", {"kind": "flat", "width": 8}))
>>> config = configure("narrow", ModelOptions(heads=2), {}, Hierarchy.flat([5]))
>>> encoder = create(config, {"text": Modality(tokens=10)}, kinds=("sequence",), keys=())
>>> encoder.config.kind, encoder.config.width, encoder.config.heads
('flat', 8, 2)
>>> MODELS.remove("narrow")

Another kind of encoder also needs an architecture: `ARCHITECTURES.register("mine", Architecture(…))`, then
`MODELS.register("mine", Model("mine"))`. `hsa.baselines.han` is an example. Another kind of attention for our encoder goes
into `hsa.registry.KINDS`; `hsa.baselines.deepsets` is an example. Register in a module that is imported before the name is
used; values may be `"module:attribute"` strings, which are imported when they are first needed.

Importing this module does not import torch.
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
"""Options of plug-ins by the name of their group, such as {"documents": DocumentOptions(…)}; others have defaults."""


class EncoderConfigLike(Protocol):
    """Configuration of an encoder: a frozen dataclass with a field `architecture` and the fields and properties below.

    Unless `has_fixed_size`, it also has a field `feed_forward` (an inner width, or None), which is replaced to match the
    size of another model.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def width(self) -> int:
        """Size of the vectors."""

    @property
    def dropout(self) -> float:
        """Dropout of the encoder and of the head."""

    @property
    def architecture(self) -> str:
        """Name in `ARCHITECTURES`."""

    @property
    def keeps_leaves(self) -> bool:
        """Whether the encoder returns a vector for every leaf of its input."""

    @property
    def has_fixed_size(self) -> bool:
        """Whether the size is fixed, for example by pre-trained weights, and cannot be matched to another model."""


@dataclass(frozen=True)
class Explanation:
    """Plot of the attention of a model to one example.

    Attributes:
        file: Name of the image file.
        leaves: Maximum number of leaves for which the plot is legible.
        draw: `draw(path, model, example, labels, title)`.
        applies: `applies(model)` returns whether the model has something to plot.
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
        encoder: Module, built as `encoder(config, modalities, kinds, keys)`. It has the attributes `config` and `embedding`
            and a method `prepare(inputs)`, and maps `Inputs` to vectors and the forest whose leaves they are.
        configure: `configure(options, extra, hierarchy, changes)` returns the config for the options of a run, the trees of
            its data and the changes of a `Model`; it raises `InvalidInput` if the trees lack a level that it needs.
        warm_start: Hook `warm_start(encoder, load)`: returns the parameters that pre-trained weights set, and loads these
            weights if `load` is true.
        tokenizer: Hook `tokenizer(extra, say)`: returns the tokenizer that the model needs, or None; `say` is called with
            progress messages.
        explanation: Hook: `"module:attribute"` of an `Explanation`.
    """

    config: type[Any]
    encoder: type[nn.Module]
    configure: Callable[[ModelOptions, Extra, Hierarchy, Mapping[str, Any]], Any]
    warm_start: Callable[[nn.Module, bool], list[nn.Parameter]] | None = None
    tokenizer: Callable[[Extra, Callable[[str], None]], Any] | None = None
    explanation: str | None = None


@dataclass(frozen=True)
class Model:
    """A named model: an architecture with some fields changed.

    Attributes:
        architecture: Name in `ARCHITECTURES`.
        changes: Fields of its configuration that replace those of the options.
        fuses: Whether NAME+FUSION is allowed: the heads can be combined in another way.
    """

    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fuses: bool = True


ARCHITECTURES: Registry[Architecture] = Registry("architecture")
"""Architectures of classifiers, by the `architecture` of their configurations."""
ARCHITECTURES.register("tree", "hsa.models.tree_encoder:TREE")

MODELS: Registry[Model] = Registry("models")
"""Classifiers that `hsa train --models` can train."""
MODELS.register("hierarchical", Model("tree", {"kind": "hierarchical"}))
# Positions in the input: the kernels of multiscale attention take none in the logits.
MODELS.register("multiscale", Model("tree", {"kind": "multiscale", "position_input": True, "position_dim": 0}))
MODELS.register("clustered", Model("tree", {"kind": "clustered"}))
MODELS.register("bottom-up", Model("tree", {"kind": "bottom-up"}))
MODELS.register("flat", Model("tree", {"kind": "flat"}))


def find_model(name: str) -> Model:
    """Return a model by its name; NAME+FUSION is the model NAME with its heads combined by FUSION.

    >>> find_model("flat+talking").changes
    {'kind': 'flat', 'fusion': 'talking'}
    """
    base, plus, fusion = name.partition("+")
    model = MODELS.get(base)
    if not plus:
        return model
    if not model.fuses:
        raise InvalidInput("models", got=repr(name), expected=f"{base}, whose heads cannot be fused in another way")
    if fusion not in FUSIONS:
        raise InvalidInput("models", got=repr(name), expected=f"{base}+ and one of {', '.join(FUSIONS.names())}")
    return Model(model.architecture, {**model.changes, "fusion": fusion})


def configure(name: str, options: ModelOptions, extra: Extra, hierarchy: Hierarchy) -> EncoderConfigLike:
    """Return the encoder configuration of a model by its name.

    Args:
        name: Name in `MODELS`, or NAME+FUSION.
        options: Sizes of the models of a run.
        extra: Options of plug-ins.
        hierarchy: Trees of the data.

    Raises:
        InvalidInput: For an unknown name, or trees that lack a level that the model needs.
    """
    model = find_model(name)
    return ARCHITECTURES.get(model.architecture).configure(options, extra, hierarchy, model.changes)


def create(
    config: EncoderConfigLike, modalities: Mapping[str, Modality], kinds: Sequence[str], keys: Sequence[str]
) -> Any:
    """Build the encoder of a configuration, with new weights.

    Args:
        config: Configuration of the encoder.
        modalities: Contents of the leaves, by name.
        kinds: Kinds of domains that have positions.
        keys: Keys of tables.
    """
    return ARCHITECTURES.get(config.architecture).encoder(config, modalities, kinds, keys)


def config_from_dict(data: Mapping[str, Any]) -> EncoderConfigLike:
    """Rebuild an encoder configuration from the result of `dataclasses.asdict`."""
    # JSON has no tuples.
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
    kind = ARCHITECTURES.get(values.pop("architecture")).config
    return kind(**known_fields(kind, values))


def start_warm(encoder: nn.Module, *, load: bool = True) -> list[nn.Parameter]:
    """Return the parameters that pre-trained weights set, if the encoder's configuration names any.

    Args:
        encoder: Encoder with new weights.
        load: Whether to load the pre-trained weights; False if a checkpoint replaces them anyway.
    """
    hook = ARCHITECTURES.get(encoder.config.architecture).warm_start  # type: ignore[union-attr, arg-type]
    return [] if hook is None else hook(encoder, load)


def required_tokenizer(names: Iterable[str], extra: Extra, say: Callable[[str], None]) -> Any:
    """Return the tokenizer that one of the models needs; None if none of them needs a certain one."""
    for name in names:
        hook = ARCHITECTURES.get(find_model(name).architecture).tokenizer
        if hook is not None and (tokenizer := hook(extra, say)) is not None:
            return tokenizer
    return None


def explanation_of(model: Classifier) -> Explanation | None:
    """Return the plot of the attention of a model; None if there is none."""
    where = ARCHITECTURES.get(model.config.encoder.architecture).explanation
    if where is None:
        return None
    explanation: Explanation = resolve(where)
    return explanation if explanation.applies(model) else None


@dataclass(frozen=True)
class LanguageArchitecture:
    """A family of language models.

    Attributes:
        config: Dataclass of the sizes, with `to_dict` and `from_dict`; its field `architecture` holds this entry's name.
        module: `CausalLanguageModel`, built from a config.
        configure: `"module:attribute"`: `configure(data, options, language, extra, changes)` returns the config for the
            options of a run.
        reader: `"module:attribute"` of the `Reader` that feeds texts to the model in training and evaluation.
        matched: Whether the width of its feed-forward networks is matched to the size of our model.
    """

    config: type[Any]
    module: type[CausalLanguageModel]
    configure: str
    reader: str
    matched: bool = False


LANGUAGE_ARCHITECTURES: Registry[LanguageArchitecture] = Registry("architecture")
"""Architectures of language models, by the `architecture` of their configurations."""
LANGUAGE_ARCHITECTURES.register("decoder", "hsa.models.language_model:DECODER")

LANGUAGE_MODELS: Registry[Model] = Registry("models")
"""Language models that `hsa train --task lm --models` can train."""
for _name in ("multiscale", "clustered", "flat"):
    LANGUAGE_MODELS.register(_name, Model("decoder", {"attention": _name}))


def create_language_model(config: Any) -> CausalLanguageModel:
    """Build the language model of a configuration, with new weights."""
    return LANGUAGE_ARCHITECTURES.get(config.architecture).module(config)
