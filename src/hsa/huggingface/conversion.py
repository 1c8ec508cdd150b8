"""`convert`, `revert` and `settings_of`: attention over trees in the layers of a pre-trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

from hsa.attention.clustered.threshold import Threshold, check_threshold, entries_of
from hsa.errors import InvalidInput
from hsa.huggingface.hooks import Conversion
from hsa.huggingface.interface import NAME, register
from hsa.huggingface.layer_plan import LayerPlan, layers_that_cache_trees
from hsa.huggingface.layers import attention_layers, contains, find_transformer, is_causal, why_not_convert
from hsa.huggingface.settings import DEFAULT, FUNCTION, Kind, LayerSettings, ModelSettings, Tree, select_given
from hsa.huggingface.vocabulary import Vocabulary, is_tokenizer

Model = TypeVar("Model")
PLAIN = "plain softmax attention to the whole sequence"


def convert(
    model: Model,
    layers: Iterable[int] | int | None = None,
    *,
    tokenizer: Any = None,
    kind: Kind = DEFAULT.kind,
    tree: Tree | Callable[..., Any] | None = DEFAULT.tree,
    branching: Sequence[int] | None = DEFAULT.branching,
    near: int = DEFAULT.near,
    threshold: float | Sequence[float | Sequence[float]] | Tensor | None = DEFAULT.threshold,
    top_k: int | None = DEFAULT.top_k,
    pooled_bias: float | Sequence[float] = DEFAULT.pooled_bias,
    sinks: int | Literal["special"] | None = DEFAULT.sinks,
    tile: int | None = DEFAULT.tile,
    exact_until: int | None = DEFAULT.exact_until,
) -> Model:
    """Replace the attention of a pre-trained model by attention over trees, in place. Weights stay the same.

    Call it again to convert more layers or to change the settings of some; layers that you do not name keep theirs. `revert`
    restores exact attention. Settings are saved with the model: after loading, `convert(model)` without settings applies
    the saved ones.

    Args:
        model: Transformers model (`PreTrainedModel`), or a module that contains one, such as a `SentenceTransformer`.
        layers: Layer numbers from 0, or negative from the end. Default: all layers with plain softmax attention to the whole
            sequence, so none with a sliding window.
        tokenizer: Tokenizer of the model, needed for `sinks="special"` and `tree="sentences"`. Default: `model.tokenizer`,
            which a `SentenceTransformer` has.
        kind: "clustered" (multiscale attention over clustered keys, closest to exact attention), "multiscale" (over a
            tree) or "hierarchical" (the paper's operator, over a tree).
        tree: Tree for "multiscale" and "hierarchical": "windows" of consecutive tokens (default), "sentences", or a
            function from a list of token ids per sequence to a `Hierarchy` with one tree per sequence.
        branching: Members per family, from the leaves up. The last factor repeats up to the root, except for
            "hierarchical". (8, 2) by default. In causal layers that select groups: keys per group, groups per node and nodes
            per chunk, (8, 8, 4) by default.
        near: Number of neighbouring leaf families on each side that are exact ("multiscale" only).
        threshold: Share of a query's attention from which a group is exact. Smaller is closer to exact attention. In causal
            layers 1/256 by default for "clustered"; "multiscale" over windows selects only with `threshold` or `top_k`. In
            other layers it is used in place of `top_k` if it is given: tiles of 64 queries select together, which is faster
            on long inputs.
            One number, or a sequence or tensor with an entry for each layer of this call, in the order of `layers`: a
            number, or one number per query head.
        top_k: Number of exact groups per query, those with the highest scores; 8 by default. More is closer to exact
            attention. In causal layers: number of groups that each query selects, in place of `threshold`.
        pooled_bias: Number added to the logits of pooled nodes, or one number per head.
        sinks: Tokens that are always exact: the first n, "special" tokens such as [CLS] and [SEP], or None. Causal layers
            that select groups always read the group of the first token exactly.
        tile: Number of neighbouring queries that share a selection. Default: 1 for clustered keys, otherwise a leaf
            family. In causal layers 64: there a query shares only what earlier queries of its tile have selected.
        exact_until: Number of tokens up to which layers with a threshold, and all causal layers that select groups, attend
            exactly: the first tokens of a text in causal layers, shorter texts in others. 2,048 by default.

    Returns:
        The same model.

    Raises:
        Unsupported: The model does not use transformers' attention interface, or contains no or several models.
        InvalidInput: A layer does not exist, or a setting does not fit.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> model = convert(model, layers=[1, -1], top_k=4)
    >>> sorted(settings_of(model))
    [1, 2]
    """
    register()
    inner = find_transformer(model)
    modules = attention_layers(inner)
    saved = _saved_settings(inner.config, modules) or ModelSettings({})
    passed = select_given(
        kind=kind,
        tree=tree,
        branching=branching,
        near=near,
        threshold=threshold,
        top_k=top_k,
        pooled_bias=pooled_bias,
        sinks=sinks,
        tile=tile,
        exact_until=exact_until,
    )
    by_number = _by_number(modules, saved, layers, passed)
    _convert_layers(model, inner, modules, by_number, saved, tokenizer)
    return model


def revert(model: Model, layers: Iterable[int] | int | None = None) -> Model:
    """Restore the exact attention of layers, in place. Reverting the last converted layer restores the whole model.

    Args:
        model: Converted model, as passed to `convert`.
        layers: Layer numbers from 0, or negative from the end. Default: all layers.

    Returns:
        The same model.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> sorted(settings_of(revert(convert(model), layers=0)))
    [1, 2]
    """
    register()
    inner = find_transformer(model)
    modules = attention_layers(inner)
    if layers is not None:
        saved = _saved_settings(inner.config, modules)
        if (
            saved is None and inner.config._attn_implementation == NAME
        ):  # loaded as "hsa", without settings in its config
            saved = ModelSettings(dict.fromkeys(_default_layers(modules), LayerSettings()))
        if saved is None:
            return model
        removed = set(_numbers(layers, len(modules)))
        left = {number: layer for number, layer in saved.layers.items() if number not in removed}
        if left:
            conversion = _conversion_of(modules)
            vocabulary = conversion.vocabulary if conversion else Vocabulary(saved.special_ids)
            _apply(inner, modules, ModelSettings(left, saved.special_ids), vocabulary)
            return model
    _revert_all(inner, modules)
    return model


def _revert_all(model: Any, modules: list[Any]) -> None:
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


def convert_as(model: Model, settings: Mapping[int, LayerSettings], *, tokenizer: Any = None) -> Model:
    """Convert exactly these layers, each with its own settings, in place. All other layers become exact.

    Args:
        model: Model as for `convert`.
        settings: Settings by layer number, such as `settings_of(other)` or `calibrate(…).settings`.
        tokenizer: Tokenizer as for `convert`.

    Returns:
        The same model.

    Raises:
        Unsupported, InvalidInput: As `convert` does.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> model = convert_as(model, {0: LayerSettings(top_k=4), 2: LayerSettings(top_k=16)})
    >>> {number: layer.top_k for number, layer in settings_of(model).items()}
    {0: 4, 2: 16}
    """
    revert(model)
    if settings:
        inner = find_transformer(model)
        modules = attention_layers(inner)
        by_number = {_numbers(number, len(modules))[0]: layer for number, layer in settings.items()}
        _check_layers(by_number, modules)
        _convert_layers(model, inner, modules, by_number, ModelSettings({}), tokenizer)
    return model


def settings_of(model: Any) -> dict[int, LayerSettings]:
    """Return the settings of the converted layers of a model, by layer number.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> settings_of(convert(model, layers=1))[1].kind
    'clustered'
    """
    inner = find_transformer(model)
    if ModelSettings.of(inner.config) is None:
        return {}
    saved = _saved_settings(inner.config, attention_layers(inner))
    return {} if saved is None else dict(saved.layers)


def _saved_settings(config: Any, modules: list[Any]) -> ModelSettings | None:
    """Return the settings in a model's config, with the tree functions that only its layers hold."""
    saved = ModelSettings.of(config)
    if saved is None:
        return None
    saved.check_numbers(len(modules))
    plans = {number: getattr(modules[number], "hsa_plan", None) for number in saved.layers}
    with_functions = {
        number: plan.settings
        for number, plan in plans.items()
        if plan is not None and saved.layers[number].tree == FUNCTION and plan.settings is not None
    }
    return replace(saved, layers={**saved.layers, **with_functions})


def _by_number(
    modules: list[Any], saved: ModelSettings, layers: Any, passed: dict[str, Any]
) -> dict[int, LayerSettings]:
    """Return the settings of all converted layers: the saved ones and those of this call."""
    if layers is None and saved.layers and set(passed) <= {"tree"}:
        function: Any = passed.get("tree")
        missing = [number for number, layer in saved.layers.items() if layer.tree == FUNCTION]
        if missing and not callable(function):
            raise InvalidInput(
                "tree",
                problem=f"the tree of layer {missing[0]} came from a function, which a config cannot hold",
                expected="that function",
                fix="Call hsa.huggingface.convert(model, tree=function); other settings are read from the config",
            )
        if missing or not passed:
            restored = {number: replace(saved.layers[number], tree=function) for number in missing}
            return {**saved.layers, **restored}
    per_layer = entries_of(passed.get("threshold"))
    new = LayerSettings(**passed if per_layer is None else {**passed, "threshold": None})
    numbers = _default_layers(modules) if layers is None else _numbers(layers, len(modules))
    if not numbers:
        reasons = " or ".join(sorted({f"{why_not_convert(module)}" for module in modules}))
        raise InvalidInput("model", got=f"only layers with {reasons}", expected=f"layers with {PLAIN}")
    by_number = dict.fromkeys(numbers, new)
    if per_layer is not None:
        thresholds = _check_thresholds(per_layer, numbers)
        by_number = {number: replace(new, threshold=threshold) for number, threshold in thresholds.items()}
    _check_layers(by_number, modules)
    return {**saved.layers, **by_number}


def _default_layers(modules: list[Any]) -> list[int]:
    return [number for number, module in enumerate(modules) if why_not_convert(module) is None]


def _numbers(layers: Any, count: int) -> list[int]:
    if isinstance(layers, (int, np.integer)) and not isinstance(layers, bool):
        layers = [layers]
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InvalidInput("layers", expected="layer numbers, such as [7, 9, 11]", got=repr(layers))
    numbers = []
    for number in layers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not -count <= number < count:
            raise InvalidInput(
                "layers", expected=f"numbers from 0 to {count - 1}, as the model has {count} layers", got=repr(number)
            )
        numbers.append(int(number) % count)
    if not numbers:
        raise InvalidInput(
            "layers", expected="at least one number", got="an empty list", fix="Use revert(model) to undo a conversion"
        )
    return sorted(numbers) if isinstance(layers, (set, frozenset)) else list(dict.fromkeys(numbers))


def _check_thresholds(thresholds: Sequence[Any], numbers: list[int]) -> dict[int, Threshold]:
    """Return the threshold of each layer, given one after another."""
    if len(thresholds) != len(numbers):
        raise InvalidInput(
            "threshold",
            expected=f"one number, or an entry for each of the {len(numbers)} layers {numbers}",
            got=f"a sequence of {len(thresholds)}",
            fix="An entry is a number, or a list with one number per query head",
        )
    pairs = zip(numbers, thresholds, strict=True)
    return {number: check_threshold(x, f"threshold[{i}]") for i, (number, x) in enumerate(pairs)}


def _check_layers(settings: Mapping[int, LayerSettings], modules: list[Any]) -> None:
    """Check that these layers can be converted, and that their settings fit their heads."""
    for number, layer in settings.items():
        if layer.tree == FUNCTION:
            raise InvalidInput("tree", expected="the function itself", got=repr(FUNCTION))
        if reason := why_not_convert(modules[number]):
            fix = f"Leave layer {number} out of layers"
            raise InvalidInput("layers", got=f"layer {number}, with {reason}", expected=f"layers with {PLAIN}", fix=fix)
        heads = getattr(modules[number].config, "num_attention_heads", None)
        for name in ("threshold", "pooled_bias"):
            value = getattr(layer, name)
            if isinstance(value, tuple) and heads not in (None, len(value)):
                raise InvalidInput(
                    name,
                    expected=f"one number, or one for each of the {heads} heads of layer {number}",
                    got=f"{len(value)} numbers",
                    fix="Pass as many numbers as the layer has query heads",
                )


def _conversion_of(modules: list[Any]) -> Conversion | None:
    """Return the conversion of the model of these layers, or of a model around or inside it."""
    plans = (getattr(module, "hsa_plan", None) for module in modules)
    return next((plan.conversion for plan in plans if plan is not None and plan.conversion is not None), None)


def _vocabulary(
    modules: list[Any], tokenizer: Any, layers: Iterable[LayerSettings], saved: ModelSettings
) -> Vocabulary:
    if tokenizer is not None:
        return Vocabulary.of(tokenizer)
    conversion = _conversion_of(modules)
    if conversion is not None and conversion.vocabulary.tokenizer is not None:
        return conversion.vocabulary
    known = Vocabulary(saved.special_ids)
    for settings in layers:
        if settings.tree == "sentences" or (settings.sinks == "special" and not known.special_ids):
            raise InvalidInput(
                "tokenizer",
                problem="not given",
                expected="the model's tokenizer, which sinks='special' and tree='sentences' need",
                fix="Call convert(model, tokenizer=AutoTokenizer.from_pretrained(…), …)",
            )
    return known


def _convert_layers(
    model: Any,
    inner: Any,
    modules: list[Any],
    by_number: dict[int, LayerSettings],
    saved: ModelSettings,
    tokenizer: Any,
) -> None:
    """Check the settings of all converted layers of `inner`, the transformers model inside `model`, and apply them."""
    for number, layer in by_number.items():
        layer.check(number, causal=is_causal(modules[number]))
    if tokenizer is None and inner is not model and is_tokenizer(getattr(model, "tokenizer", None)):
        tokenizer = model.tokenizer
    vocabulary = _vocabulary(modules, tokenizer, by_number.values(), saved)
    wrappers = [module for module in model.modules() if contains(module, inner)]
    _apply(inner, modules, ModelSettings(by_number, vocabulary.special_ids), vocabulary, wrappers)


def _apply(
    model: Any, modules: list[Any], settings: ModelSettings, vocabulary: Vocabulary, wrappers: Sequence[Any] = ()
) -> None:
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
        wrappers,
        record_ids=any(layer.needs_ids for layer in settings.layers.values()),
        tree_caches=layers_that_cache_trees(modules),
    )
    model.config.hsa = settings.to_json()


def _set_attention(model: Any, name: str | None) -> None:
    """Set a model's attention, also where transformers would only warn because it does not recognise the source."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name
