"""`convert` and `revert`: hierarchical attention in the layers of a pre-trained model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hsa.errors import InvalidInput
from hsa.huggingface.interface import NAME, Conversion, ConvertedLayer, caching_layers, register
from hsa.huggingface.layers import attention_layers, is_causal, is_sliding
from hsa.huggingface.settings import GIVEN, LayerSettings, Settings
from hsa.huggingface.vocabulary import Vocabulary

Model = TypeVar("Model")


def convert(
    model: Model,
    layers: Iterable[int] | None = None,
    *,
    tokenizer: Any = None,
    **settings: Any,
) -> Model:
    """Replace attention in layers of a transformers model, in place. The other layers keep PyTorch's exact attention.

    Called again, it changes the layers that are named and leaves the others as they are. Without settings, a model whose
    config already has some (it was converted, saved and loaded) gets those back. `revert` undoes it all.

    Args:
        model: a `PreTrainedModel` that takes its attention from transformers' interface. Its weights are not touched.
        layers: numbers from 0, negative from the end; all that see the whole sequence, unless given.
        tokenizer: the model's; needed for `sinks="special"` and `hierarchy="sentences"`.
        settings: any of

            operator: "multiscale" (every query keeps its row) or "hierarchical" (the paper's).
            hierarchy: "keys": trees found from the keys of each head, the most faithful; "windows" of consecutive tokens;
                "sentences" of the text; or a function from a list of ids per sequence to a `Hierarchy`, a tree per sequence.
            branching: members per family, from the leaves up. Multiscale trees repeat the last factor up to the root; the
                paper's join what is left under it.
            near: neighbouring families that are exact too (not with "keys").
            top_k: how many more families are exact: the best by the queries' own scores. The fidelity dial.
            beam: width of the search for them; "exact" looks at all.
            pooled_bias: added to the logits of pooled nodes, one number or one per head.
            sinks: tokens that are always exact: the first n, "special" ([CLS], [SEP], …), or None.
            share: neighbouring queries that share a choice; one for "keys", those of a family for the others, unless given.
                In causal models every query chooses for itself.
            chunk: how many tokens are searched for trees together ("keys"): in causal models 256, once they are complete,
                else all, unless given.

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
    written = _settings(config, modules) or Settings({})
    unknown = sorted(set(settings) - set(LayerSettings.__dataclass_fields__))
    if unknown:
        raise InvalidInput(unknown[0], given="a setting", expected=f"one of {list(LayerSettings.__dataclass_fields__)}")
    by_number = _by_number(modules, written, layers, settings)
    for number, layer in by_number.items():
        layer.check_direction(number, may_look_ahead=not is_causal(modules[number]))
    vocabulary = _vocabulary(modules, tokenizer, by_number.values(), written)
    _apply(model, modules, Settings(by_number, vocabulary.special_ids), vocabulary)
    return model


def revert(model: Model, layers: Iterable[int] | None = None) -> Model:
    """Give layers (all, unless named) their exact attention back; with the last one, the model is what it was."""
    register()
    modules = attention_layers(model)
    config: Any = model.config  # type: ignore[attr-defined]
    written = _settings(config, modules)
    if written is None and config._attn_implementation == NAME:  # loaded so, with nothing said
        written = Settings(dict.fromkeys(_by_default(modules), LayerSettings()))
    if written is None:
        return model
    gone = set(_numbers(layers, len(modules)) if layers is not None else written.layers)
    left = {number: layer for number, layer in written.layers.items() if number not in gone}
    conversion = _conversion_of(modules)
    if left:
        vocabulary = conversion.vocabulary if conversion else Vocabulary(written.special_ids)
        _apply(model, modules, Settings(left, written.special_ids), vocabulary)
        return model
    if hasattr(config, "hsa"):
        del config.hsa
    for module in model.modules():  # type: ignore[attr-defined]
        if hasattr(module, "hsa_layer"):
            del module.hsa_layer
    if conversion is not None:
        conversion.leave()
    if config._attn_implementation == NAME:
        before = "sdpa" if conversion is None else conversion.before
        _set_attention(model, before)
    return model


def convert_as(model: Model, settings: Mapping[int, LayerSettings], *, tokenizer: Any = None) -> Model:
    """Convert exactly these layers, each in its own way, such as `settings_of` another model; the others are exact."""
    revert(model)
    for number, layer in settings.items():
        convert(model, [number], tokenizer=tokenizer, **vars(layer))
    return model


def settings_of(model: Any) -> dict[int, LayerSettings]:
    """The settings of the converted layers of a model, by number."""
    if Settings.of(model.config) is None:
        return {}
    written = _settings(model.config, attention_layers(model))
    return {} if written is None else dict(written.layers)


def _settings(config: Any, modules: list[Any]) -> Settings | None:
    """What a model's config says, with the functions that only its layers know."""
    written = Settings.of(config)
    if written is None:
        return None
    written.check_numbers(len(modules))
    marks = {number: getattr(modules[number], "hsa_layer", None) for number in written.layers}
    functions = {
        number: mark.settings
        for number, mark in marks.items()
        if mark is not None and written.layers[number].hierarchy == GIVEN and mark.settings is not None
    }
    return replace(written, layers={**written.layers, **functions})


def _by_number(
    modules: list[Any], written: Settings, layers: Any, settings: dict[str, Any]
) -> dict[int, LayerSettings]:
    """The settings of all converted layers, those of before included."""
    if layers is None and written.layers and set(settings) <= {"hierarchy"}:
        function: Any = settings.get("hierarchy")
        missing = [number for number, layer in written.layers.items() if layer.hierarchy == GIVEN]
        if missing and not callable(function):
            raise InvalidInput(
                "hierarchy",
                given=f"a config in which that of layer {missing[0]} came from a function, which no config can hold",
                expected="that function",
                fix="hsa.huggingface.convert(model, hierarchy=function); the other settings are read from the config",
            )
        if missing or not settings:
            again = {number: replace(written.layers[number], hierarchy=function) for number in missing}
            return {**written.layers, **again}
    if settings.get("hierarchy") == GIVEN:
        raise InvalidInput("hierarchy", given=repr(GIVEN), expected="the function itself")
    new = LayerSettings(**settings)
    chosen = _by_default(modules) if layers is None else _numbers(layers, len(modules))
    if not chosen:
        raise InvalidInput(
            "model",
            given="layers that all look no further than a window",
            expected="some that see the whole sequence",
            fix="name layers if they should be converted all the same",
        )
    _check_heads(new, modules, chosen)
    return {**written.layers, **dict.fromkeys(chosen, new)}


def _by_default(modules: list[Any]) -> list[int]:
    return [number for number, module in enumerate(modules) if not is_sliding(module)]


def _numbers(layers: Any, count: int) -> list[int]:
    if isinstance(layers, (int, np.integer)) and not isinstance(layers, bool):
        layers = [layers]
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InvalidInput("layers", given=repr(layers), expected="layer numbers, such as [7, 9, 11]")
    found = []
    for number in layers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not -count <= number < count:
            raise InvalidInput(
                "layers", given=repr(number), expected=f"numbers from 0 to {count - 1}: the model has {count} layers"
            )
        found.append(int(number) % count)
    if not found:
        raise InvalidInput(
            "layers", given="none", expected="at least one", fix="use revert(model) to undo a conversion"
        )
    return sorted(set(found))


def _check_heads(settings: LayerSettings, modules: list[Any], chosen: list[int]) -> None:
    """A bias per head fits the heads."""
    if not isinstance(settings.pooled_bias, tuple):
        return
    for number in chosen:
        heads = getattr(modules[number].config, "num_attention_heads", None)
        if heads is not None and heads != len(settings.pooled_bias):
            raise InvalidInput(
                "pooled_bias",
                given=f"{len(settings.pooled_bias)} numbers",
                expected=f"one, or one for each of the {heads} heads of layer {number}",
            )


def _conversion_of(modules: list[Any]) -> Conversion | None:
    """Of the model that these layers belong to, whether it or one around or inside it was converted."""
    marks = (getattr(module, "hsa_layer", None) for module in modules)
    return next((mark.conversion for mark in marks if mark is not None and mark.conversion is not None), None)


def _vocabulary(modules: list[Any], tokenizer: Any, layers: Iterable[LayerSettings], written: Settings) -> Vocabulary:
    if tokenizer is not None:
        return Vocabulary.of(tokenizer)
    conversion = _conversion_of(modules)
    if conversion is not None and conversion.vocabulary.tokenizer is not None:
        return conversion.vocabulary
    known = Vocabulary(written.special_ids)
    for settings in layers:
        if settings.hierarchy == "sentences" or (settings.sinks == "special" and not known.special_ids):
            raise InvalidInput(
                "tokenizer",
                given="None",
                expected="the model's tokenizer: sinks='special' and hierarchy='sentences' are read off token ids",
                fix="convert(model, tokenizer=AutoTokenizer.from_pretrained(…), …)",
            )
    return known


def _apply(model: Any, modules: list[Any], settings: Settings, vocabulary: Vocabulary) -> None:
    from transformers import PreTrainedModel

    before = model.config._attn_implementation
    if before != NAME:
        _set_attention(model, NAME)
    conversion = _conversion_of(modules) or Conversion("sdpa" if before == NAME else before)
    conversion.vocabulary = vocabulary
    conversion.leave()
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if any(layer.needs_ids for layer in settings.layers.values()):
        conversion.listen(models)
    for number, module in enumerate(modules):
        module.hsa_layer = ConvertedLayer(number, settings.layers.get(number), conversion)
    caching = caching_layers(modules)
    if caching:
        conversion.keep_trees(models, caching)
    model.config.hsa = settings.to_json()


def _set_attention(model: Any, name: str | None) -> None:
    """transformers looks for a certain phrase in the source of a model and, without it, only warns; we know that it asks."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name
