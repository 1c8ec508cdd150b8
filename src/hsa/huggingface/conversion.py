"""`convert` and `revert`: attention over trees in the layers of a pre-trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np

from hsa.errors import InvalidInput
from hsa.huggingface.hooks import Conversion
from hsa.huggingface.interface import NAME, register
from hsa.huggingface.layer_plan import LayerPlan, layers_that_cache_trees
from hsa.huggingface.layers import attention_layers, is_causal, is_sliding
from hsa.huggingface.settings import DEFAULT, FUNCTION, Kind, LayerSettings, ModelSettings, Tree, select_given
from hsa.huggingface.vocabulary import Vocabulary

Model = TypeVar("Model")


def convert(
    model: Model,
    layers: Iterable[int] | int | None = None,
    *,
    tokenizer: Any = None,
    kind: Kind = DEFAULT.kind,
    tree: Tree | Callable[..., Any] | None = DEFAULT.tree,
    branching: Sequence[int] = DEFAULT.branching,
    near: int = DEFAULT.near,
    top_k: int = DEFAULT.top_k,
    beam: int | Literal["exact"] | None = DEFAULT.beam,
    pooled_bias: float | Sequence[float] = DEFAULT.pooled_bias,
    sinks: int | Literal["special"] | None = DEFAULT.sinks,
    tile: int | None = DEFAULT.tile,
    chunk: int | None = DEFAULT.chunk,
) -> Model:
    """Replace attention in layers of a transformers model, in place. The other layers keep PyTorch's exact attention.

    Called again, it changes the layers that are named and leaves the others as they are. Without settings, a model whose
    config already has some (it was converted, saved and loaded) gets those back. `revert` undoes it all.

    Args:
        model: a `PreTrainedModel` that takes its attention from transformers' interface. Its weights are not touched.
        layers: numbers from 0, negative from the end; all that see the whole sequence, unless given.
        tokenizer: the model's; needed for `sinks="special"` and `tree="sentences"`.
        kind: "clustered" (multiscale attention over clustered keys, the most faithful), "multiscale" (over a tree) or
            "hierarchical" (the paper's operator, over a tree).
        tree: for the last two kinds: "windows" of consecutive tokens (default), "sentences" of the text, or a function from
            a list of ids per sequence to a `Hierarchy` with a tree per sequence.
        branching: members per family, from the leaves up. The last factor repeats up to the root; the paper's trees join
            what is left under it.
        near: neighbouring families that are exact too (multiscale only).
        top_k: number of groups that are exact, the best by the queries' own scores. The fidelity dial.
        beam: width of the search for them; "exact" looks at all.
        pooled_bias: added to the logits of pooled nodes, one number or one per head.
        sinks: tokens that are always exact: the first n, "special" ([CLS], [SEP], …), or None.
        tile: neighbouring queries that share a selection; unless given, 1 for clustered keys and a leaf family otherwise. In
            causal models every query selects for itself.
        chunk: tokens whose keys are clustered together; unless given, all, in causal models 256 (once they are complete).

    Returns:
        the same model.

    Raises:
        Unsupported: a model that does not take its attention from transformers' interface.
        InvalidInput: layers that are not there, settings that do not fit.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> model = convert(model, layers=[1, -1], top_k=4)
    >>> sorted(model.config.hsa["layers"])
    ['1', '2']
    """
    register()
    modules = attention_layers(model)
    config: Any = model.config  # type: ignore[attr-defined]
    written = _settings(config, modules) or ModelSettings({})
    given = select_given(
        kind=kind,
        tree=tree,
        branching=branching,
        near=near,
        top_k=top_k,
        beam=beam,
        pooled_bias=pooled_bias,
        sinks=sinks,
        tile=tile,
        chunk=chunk,
    )
    by_number = _by_number(modules, written, layers, given)
    for number, layer in by_number.items():
        if is_causal(modules[number]):
            layer.check_causal(number)
    vocabulary = _vocabulary(modules, tokenizer, by_number.values(), written)
    _apply(model, modules, ModelSettings(by_number, vocabulary.special_ids), vocabulary)
    return model


def revert(model: Model, layers: Iterable[int] | int | None = None) -> Model:
    """Give layers (all, unless named) their exact attention back; with the last one, the model is what it was."""
    register()
    modules = attention_layers(model)
    config: Any = model.config  # type: ignore[attr-defined]
    if layers is not None:
        written = _settings(config, modules)
        if written is None and config._attn_implementation == NAME:  # loaded so, with nothing in its config
            written = ModelSettings(dict.fromkeys(_by_default(modules), LayerSettings()))
        if written is None:
            return model
        gone = set(_numbers(layers, len(modules)))
        left = {number: layer for number, layer in written.layers.items() if number not in gone}
        if left:
            conversion = _conversion_of(modules)
            vocabulary = conversion.vocabulary if conversion else Vocabulary(written.special_ids)
            _apply(model, modules, ModelSettings(left, written.special_ids), vocabulary)
            return model
    return _revert_all(model, modules)


def _revert_all(model: Any, modules: list[Any]) -> Any:
    conversion = _conversion_of(modules)
    if hasattr(model.config, "hsa"):
        del model.config.hsa
    for module in model.modules():
        if hasattr(module, "hsa_plan"):
            del module.hsa_plan
    if conversion is not None:
        conversion.hook()
    if model.config._attn_implementation == NAME:
        _set_attention(model, "sdpa" if conversion is None else conversion.before)
    return model


def convert_as(model: Model, settings: Mapping[int, LayerSettings], *, tokenizer: Any = None) -> Model:
    """Convert exactly these layers, each in its own way, such as `settings_of` another model; the others are exact."""
    revert(model)
    for number, layer in settings.items():
        convert(model, [number], tokenizer=tokenizer, **vars(layer))
    return model


def settings_of(model: Any) -> dict[int, LayerSettings]:
    """Return the settings of the converted layers of a model, by number."""
    if ModelSettings.of(model.config) is None:
        return {}
    written = _settings(model.config, attention_layers(model))
    return {} if written is None else dict(written.layers)


def _settings(config: Any, modules: list[Any]) -> ModelSettings | None:
    """Read a model's config, with the functions that only its layers know."""
    written = ModelSettings.of(config)
    if written is None:
        return None
    written.check_numbers(len(modules))
    plans = {number: getattr(modules[number], "hsa_plan", None) for number in written.layers}
    functions = {
        number: plan.settings
        for number, plan in plans.items()
        if plan is not None and written.layers[number].tree == FUNCTION and plan.settings is not None
    }
    return replace(written, layers={**written.layers, **functions})


def _by_number(
    modules: list[Any], written: ModelSettings, layers: Any, given: dict[str, Any]
) -> dict[int, LayerSettings]:
    """Return the settings of all converted layers, earlier ones included."""
    if layers is None and written.layers and set(given) <= {"tree"}:
        function: Any = given.get("tree")
        missing = [number for number, layer in written.layers.items() if layer.tree == FUNCTION]
        if missing and not callable(function):
            raise InvalidInput(
                "tree",
                given=f"a config in which that of layer {missing[0]} came from a function, which no config can hold",
                expected="that function",
                fix="hsa.huggingface.convert(model, tree=function); the other settings are read from the config",
            )
        if missing or not given:
            again = {number: replace(written.layers[number], tree=function) for number in missing}
            return {**written.layers, **again}
    if given.get("tree") == FUNCTION:
        raise InvalidInput("tree", given=repr(FUNCTION), expected="the function itself")
    new = LayerSettings(**given)
    numbers = _by_default(modules) if layers is None else _numbers(layers, len(modules))
    if not numbers:
        raise InvalidInput(
            "model",
            given="layers that all look no further than a window",
            expected="some that see the whole sequence",
            fix="name layers if they should be converted all the same",
        )
    _check_heads(new, modules, numbers)
    return {**written.layers, **dict.fromkeys(numbers, new)}


def _by_default(modules: list[Any]) -> list[int]:
    return [number for number, module in enumerate(modules) if not is_sliding(module)]


def _numbers(layers: Any, count: int) -> list[int]:
    if isinstance(layers, (int, np.integer)) and not isinstance(layers, bool):
        layers = [layers]
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InvalidInput("layers", given=repr(layers), expected="layer numbers, such as [7, 9, 11]")
    numbers = set()
    for number in layers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not -count <= number < count:
            raise InvalidInput(
                "layers", given=repr(number), expected=f"numbers from 0 to {count - 1}: the model has {count} layers"
            )
        numbers.add(int(number) % count)
    if not numbers:
        raise InvalidInput(
            "layers", given="none", expected="at least one", fix="use revert(model) to undo a conversion"
        )
    return sorted(numbers)


def _check_heads(settings: LayerSettings, modules: list[Any], numbers: list[int]) -> None:
    """Check that a bias per head fits the heads."""
    if not isinstance(settings.pooled_bias, tuple):
        return
    for number in numbers:
        heads = getattr(modules[number].config, "num_attention_heads", None)
        if heads is not None and heads != len(settings.pooled_bias):
            raise InvalidInput(
                "pooled_bias",
                given=f"{len(settings.pooled_bias)} numbers",
                expected=f"one, or one for each of the {heads} heads of layer {number}",
            )


def _conversion_of(modules: list[Any]) -> Conversion | None:
    """Return the conversion of the model that these layers belong to, or of one around or inside it."""
    plans = (getattr(module, "hsa_plan", None) for module in modules)
    return next((plan.conversion for plan in plans if plan is not None and plan.conversion is not None), None)


def _vocabulary(
    modules: list[Any], tokenizer: Any, layers: Iterable[LayerSettings], written: ModelSettings
) -> Vocabulary:
    if tokenizer is not None:
        return Vocabulary.of(tokenizer)
    conversion = _conversion_of(modules)
    if conversion is not None and conversion.vocabulary.tokenizer is not None:
        return conversion.vocabulary
    known = Vocabulary(written.special_ids)
    for settings in layers:
        if settings.tree == "sentences" or (settings.sinks == "special" and not known.special_ids):
            raise InvalidInput(
                "tokenizer",
                given="None",
                expected="the model's tokenizer: sinks='special' and tree='sentences' are read off token ids",
                fix="convert(model, tokenizer=AutoTokenizer.from_pretrained(…), …)",
            )
    return known


def _apply(model: Any, modules: list[Any], settings: ModelSettings, vocabulary: Vocabulary) -> None:
    from transformers import PreTrainedModel

    before = model.config._attn_implementation
    if before != NAME:
        _set_attention(model, NAME)
    conversion = _conversion_of(modules) or Conversion("sdpa" if before == NAME else before)
    conversion.vocabulary = vocabulary
    for number, module in enumerate(modules):
        module.hsa_plan = LayerPlan(number, settings.layers.get(number), conversion)
    conversion.hook(
        [module for module in model.modules() if isinstance(module, PreTrainedModel)],
        note_ids=any(layer.needs_ids for layer in settings.layers.values()),
        tree_caches=layers_that_cache_trees(modules),
    )
    model.config.hsa = settings.to_json()


def _set_attention(model: Any, name: str | None) -> None:
    """Set a model's attention where transformers would only warn, because its source lacks a phrase it looks for."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name
