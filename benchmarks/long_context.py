"""Converted decoders on long texts: what conversion loses, and how fast they read and write.

    python -m benchmarks.long_context search MODEL --texts OTHERS --length 32768 --budget "perplexity +0.5%" --out best.json
    python -m benchmarks.long_context quality MODEL --texts TEXTS --length 32768 --settings 1/256 1/128
    python -m benchmarks.long_context needles MODEL --texts TEXTS --lengths 8192 16384 32768 --settings 1/256
    python -m benchmarks.long_context prefill MODEL --texts TEXTS --lengths 8192 32768 --settings 1/256
    python -m benchmarks.long_context decode MODEL --texts TEXTS --length 32768 --batches 1 32 --settings 1/256

MODEL is a folder with a causal language model. TEXTS is a file with tokens: `torch.save` of a dict of integers `[texts,
tokens]` by kind of text. A setting is a threshold for all layers, the file of a search, or `report.json` of `hsa convert`.
Exact attention (SDPA) is measured in the same run. All parts but the search write results/long_context_PART_NAME.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode import flat_steps
from benchmarks.measure import write_table
from benchmarks.needles import Question, questions_of
from hsa.huggingface import DecodingStep, LayerSettings, convert_as, counting, memory_of, new_cache, revert
from hsa.huggingface.fidelity.calibrate import calibrate
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.fidelity.pieces import Pieces
from hsa.huggingface.fidelity.report import describe
from hsa.huggingface.fixed_layer import FixedLayer
from hsa.huggingface.interface import NAME
from hsa.huggingface.layer_plan import Call
from hsa.huggingface.layers import attention_layers, why_not_convert

SLICE = 2048
"""Number of tokens whose logits are computed at once."""
STEPS = 64
"""Number of timed decoding steps."""
EXACT = "exact"
TRANSFORMERS = "transformers"
Settings = dict[int, LayerSettings]


class Decoder:
    """A causal language model, exact or with converted layers."""

    def __init__(self, folder: Path, gguf: str | None, yarn: float | None):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        files = {"gguf_file": gguf} if gguf else {}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config: Any = AutoConfig.from_pretrained(folder, **files)
        if yarn is not None:
            known = {"rope_type": "yarn", "factor": yarn}
            known["original_max_position_embeddings"] = config.max_position_embeddings
            config.rope_parameters = {**config.rope_parameters, **known}
            config.max_position_embeddings = int(yarn * config.max_position_embeddings)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **files)
        self.model = model.eval().to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **files)
        self.layers = [n for n, module in enumerate(attention_layers(self.model)) if why_not_convert(module) is None]

    def settings(self, name: str) -> Settings:
        """Return the settings of all layers that can be converted."""
        if name == EXACT:
            return {}
        if not name.endswith(".json"):
            return dict.fromkeys(self.layers, LayerSettings(threshold=float(Fraction(name))))
        saved = json.loads(Path(name).read_text())["settings"]
        return {int(number): LayerSettings.from_json(name, layer) for number, layer in saved.items()}

    def apply(self, name: str) -> None:
        revert(self.model)
        convert_as(self.model, self.settings(name))

    @torch.inference_mode()
    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden states of a text."""
        return self.model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden).float()

    @torch.inference_mode()
    def loss(self, ids: Tensor, begin: int) -> float:
        """Return the mean loss of the predictions made at tokens from `begin` on; the last token is only predicted."""
        hidden, target = self.hidden(ids[:-1])[begin:], ids[begin + 1 :]
        pairs = zip(hidden.split(SLICE), target.split(SLICE), strict=True)
        return sum(float(F.cross_entropy(self.logits(h), t, reduction="sum")) for h, t in pairs) / len(target)

    @torch.inference_mode()
    def finds(self, question: Question) -> bool:
        """Return whether every digit of the answer is the most probable token after the ones before it."""
        before = torch.tensor(question.digits) - 1
        best = self.logits(self.hidden(question.tokens.to(self.device))[before.to(self.device)]).argmax(-1).cpu()
        return torch.equal(best, question.tokens[list(question.digits)])


def texts_of(options: argparse.Namespace, length: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the kind and the tokens of every text."""
    for kind, rows in torch.load(options.texts, weights_only=True).items():
        for row in rows[: options.count]:
            if len(row) < length:
                raise SystemExit(f"{options.texts}: expected texts of {length:,} tokens, got {len(row):,}")
            yield kind, row[:length].long().to(device)


def search(decoder: Decoder, options: argparse.Namespace) -> None:
    """Search thresholds of all layers that keep to a budget, and save them with the measured points."""
    ids = [row.tolist() for _, row in texts_of(options, options.length, "cpu")]
    pieces, began = Pieces(options.texts.stem, ids, len(ids)), time.monotonic()
    sizes = {"longest": options.length, "batch_tokens": options.length, "warm_up": options.skip}
    judge = Judge(pieces, "lm", decoder.model, decoder.tokenizer, **sizes)

    def watch(stage: str, done: int, total: int) -> None:
        if done % 16 == 0 or done == total:
            print(f"{stage}: {done} of {total}, {time.monotonic() - began:.0f} s", flush=True)

    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = calibrate(decoder.model, judge, options.budget, folder=options.out.parent, watch=watch)
    settings = {str(number): layer.to_json() for number, layer in found.settings.items()}
    saved = {"budget": options.budget, "holds": found.holds, "settings": settings, "frontier": found.frontier}
    options.out.write_text(json.dumps({**saved, "seconds": time.monotonic() - began}))
    rows = []
    for point in found.frontier:
        change, mark = f"{100 * point['perplexity change']:+.2f}%", "chosen" if point["chosen"] else ""
        rows.append([point["converted"], point["ops"], point["perplexity"], change, mark])
    header = ["layers converted", "× fewer operations", "perplexity", "change", ""]
    chosen = "; ".join(describe(found.settings[number]) for number in sorted(found.settings))
    notes = (
        f"{_model(decoder, options)}. Points on the path of the search for {options.budget!r}, on {len(ids)} texts of "
        f"{options.length:,} tokens, tokens from {options.skip:,} on. The search took {time.monotonic() - began:.0f} s. "
        f"Settings of the converted layers at the chosen point, in order: {chosen}."
    )
    _write("search", "Search for a threshold per layer", header, rows, notes, options)


def quality(decoder: Decoder, options: argparse.Namespace) -> None:
    texts = list(texts_of(options, options.length + 1, decoder.device))
    kinds = list(dict.fromkeys(kind for kind, _ in texts))
    results: dict[str, list[float]] = {}
    rows = []
    for name in (EXACT, *options.settings):
        decoder.apply(name)
        results[name] = [decoder.loss(ids, options.skip) for _, ids in texts]
        with counting() as counted:
            decoder.hidden(texts[0][1][:-1])
        fewer = counted.ratio if counted.layers else 1.0
        more = [loss - exact for loss, exact in zip(results[name], results[EXACT], strict=True)]
        cells = [_change([m for m, (kind, _) in zip(more, texts, strict=True) if kind == k]) for k in kinds]
        perplexity = math.exp(statistics.fmean(results[name]))
        rows.append([_name(name), fewer, perplexity, *(["–"] * len(kinds) if name == EXACT else cells), _change(more)])
        print(*rows[-1], sep=" · ", flush=True)
    header = ["threshold", "× fewer operations", "perplexity", *kinds, "all"]
    notes = (
        f"{_model(decoder, options)}, {len(texts)} texts of {options.length:,} tokens, tokens from {options.skip:,} on. "
        "Operations of attention in all layers, with clustering, pooling and selection, on the first text. Changes of "
        "perplexity against exact attention, with their standard error over texts."
    )
    _write("quality", "Perplexity of a converted decoder", header, rows, notes, options)


def needles(decoder: Decoder, options: argparse.Namespace) -> None:
    rows = []
    for length in options.lengths:
        _, text = next(texts_of(options, length, "cpu"))
        questions = questions_of(text, options.needles, decoder.tokenizer)
        found: dict[str, list[bool]] = {}
        for name in (EXACT, *options.settings):
            decoder.apply(name)
            found[name] = [decoder.finds(question) for question in questions]
            kept = sum(a and b for a, b in zip(found[name], found[EXACT], strict=True))
            missed = [f"{100 * (2 * i + 1) // (2 * len(questions))}%" for i, hit in enumerate(found[name]) if not hit]
            rows.append(
                [
                    f"{length:,}",
                    _name(name),
                    f"{sum(found[name])}/{len(questions)}",
                    f"{kept}/{sum(found[EXACT])}",
                    ", ".join(missed) or "–",
                ]
            )
            print(*rows[-1], sep=" · ", flush=True)
    header = ["tokens", "threshold", "found", "of those that exact attention finds", "missed at depth"]
    notes = (
        f"{_model(decoder, options)}. {options.needles} facts at evenly spaced depths of a book, one question for each "
        "at the end. A fact counts as found if every digit of its number is the most probable token."
    )
    _write("needles", "Facts found in a long text", header, rows, notes, options)


def prefill(decoder: Decoder, options: argparse.Namespace) -> None:
    rows = []
    for length in options.lengths:
        _, ids = next(texts_of(options, length, decoder.device))
        times: dict[str, list[float]] = {name: [] for name in (EXACT, *options.settings)}
        for turn in range(options.repeats + 1):  # a slow phase affects all; the first turn compiles kernels
            for name, measured in times.items():
                decoder.apply(name)
                for _ in range(1 if decoder.device == "cpu" else 2):  # the first pass records the launches of kernels
                    began = time.perf_counter()
                    with torch.no_grad():
                        decoder.model(input_ids=ids[None], use_cache=True, logits_to_keep=1)
                    _wait(decoder.device)
                measured += [1e3 * (time.perf_counter() - began)] if turn else []
        for name, measured in times.items():
            ms = statistics.median(measured)
            rows.append([f"{length:,}", _name(name), ms, statistics.median(times[EXACT]) / ms])
            print(*rows[-1], sep=" · ", flush=True)
    header = ["tokens", "threshold", "ms", "× faster"]
    notes = (
        f"{_model(decoder, options)}, one text, the whole model: a forward pass that fills the cache and returns the "
        f"logits after the last token. Medians of {options.repeats} passes in turns. Exact attention is SDPA, as "
        "transformers calls it."
    )
    _write("prefill", "Reading a prompt", header, rows, notes, options)


def decode(decoder: Decoder, options: argparse.Namespace) -> None:
    rows = []
    (_, ids), model = next(texts_of(options, options.length + STEPS, decoder.device)), decoder.model
    prompt, rest = ids[None, : options.length], ids[options.length :]
    shape = attention_layers(model)[decoder.layers[0]]
    for batch in options.batches:
        sdpa = fastest = math.nan
        for name in (EXACT, *options.settings):
            decoder.apply(name)
            cache = new_cache(model, options.length + 4 * STEPS) if name != EXACT else None
            with torch.no_grad():
                cache = model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            cache.batch_repeat_interleave(batch)
            eager = _eager(decoder, cache, rest, batch)
            cache.crop(-len(rest))
            if name == EXACT:
                cache.layers = [FullLayer(layer, batch, options.length) for layer in cache.layers]
                model.set_attn_implementation(NAME)  # steps do not read the settings of these layers
            attention, graph, memory = _graph(decoder, cache, rest, batch)
            if name == EXACT:
                sdpa, fastest = _flat(shape, options.length, batch, len(decoder.layers))
            ratios = [sdpa / attention, fastest / attention]
            row = [batch, _name(name), eager, graph, 1e3 * batch / graph, attention, *ratios, memory]
            rows.append(row)
            print(*row, sep=" · ", flush=True)
            del cache
            torch.cuda.empty_cache()
    header = [
        "sequences",
        "threshold",
        "eager ms",
        "graph ms",
        "tokens/s",
        "attention ms",
        "× SDPA",
        "× fastest",
        "× memory",
    ]
    notes = (
        f"{_model(decoder, options)}, after {options.length:,} tokens; the sequences of a batch are copies. Times of a step "
        f"of the whole model, medians of {STEPS} steps that follow the text: called from Python, and as a CUDA graph "
        "(tokens/s are those of the graph). Attention: all layers alone, as a CUDA graph; compared with SDPA as "
        "transformers calls it, and with the fastest exact kernel (SDPA's flash and cuDNN kernels, and matrix products, "
        "with the query heads of a key/value head as rows). Memory of the cache, relative to a flat cache."
    )
    _write("decode", "Writing after a long text", header, rows, notes, options)


class FullLayer(FixedLayer):
    """Cache of a fixed size that is always full, so that SDPA needs no mask: the fastest exact step."""

    def __init__(self, layer: Any, batch: int, length: int):
        super().__init__(layer, torch.ones(batch, length, dtype=torch.bool, device=layer.keys.device), length)
        self.max_length = length + 4 * STEPS  # new keys replace the first ones

    def step(self, call: Call) -> Tensor:
        row = self.position % self.rows
        self.k.index_copy_(2, row, call.key)
        self.v.index_copy_(2, row, call.value)
        self.position.add_(1)
        grouped = call.query.shape[1] != self.k.shape[1]
        return F.scaled_dot_product_attention(
            call.query, self.k, self.v, scale=call.scale, enable_gqa=grouped
        ).transpose(1, 2)


def _eager(decoder: Decoder, cache: Any, rest: Tensor, batch: int) -> float:
    times = []
    for token in rest:
        began = time.perf_counter()
        with torch.no_grad():
            decoder.model(input_ids=token.expand(batch, 1), past_key_values=cache, use_cache=True)
        _wait(decoder.device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def _graph(decoder: Decoder, cache: Any, rest: Tensor, batch: int) -> tuple[float, float, float]:
    """Return the milliseconds of attention alone and of a whole step, as CUDA graphs, and the memory of the cache."""
    step = DecodingStep(decoder.model, cache)
    times = _replayed(lambda token: step(token.expand(batch)), rest)
    calls: list[tuple[Any, Any]] = []

    def keeping(run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def keep(call: Any) -> Tensor:
            calls.append((run, call))
            return run(call)

        return keep

    for layer in cache.layers:
        layer.step = keeping(layer.step)
    step._run()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.graph(graph):
        for run, call in calls:
            run(call)
    attention = _replayed(lambda _: graph.replay(), rest)
    memory = memory_of(cache)
    return attention, times, memory.bytes / memory.flat_bytes


def _replayed(run: Callable[[Tensor], Any], tokens: Tensor) -> float:
    """Return the median milliseconds of runs on the device."""
    times = []
    for token in tokens:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(token)
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times[4:])


def _flat(module: Any, length: int, batch: int, layers: int) -> tuple[float, float]:
    """Return the milliseconds of exact attention of all layers: SDPA as transformers calls it, and the fastest kernel.

    Every layer has keys and values of its own, as in a model, so that they are read from memory and not from a cache.
    """
    config = module.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    sizes = length, batch, "cuda", torch.bfloat16, heads, kv_heads, dim
    steps = [_flat_steps(*sizes) for _ in range(layers)]
    times = {}
    for name in steps[0]:
        try:
            steps[0][name]()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for step in steps:
                    step[name]()
            times[name] = _replayed(lambda _: graph.replay(), torch.arange(STEPS))  # noqa: B023
        except RuntimeError:  # a kernel that does not take this shape
            torch.cuda.synchronize()
    return times[TRANSFORMERS], min(times.values())


def _flat_steps(
    length: int, batch: int, device: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> dict[str, Callable[[], Any]]:
    """Return a step of one layer for every exact kernel."""
    q, k, v = (
        torch.randn(batch, n, tokens, dim, device=device, dtype=dtype)
        for n, tokens in ((heads, 1), (kv_heads, length), (kv_heads, length))
    )
    steps = flat_steps(length, batch, device, dtype, heads, kv_heads, dim)
    return {**steps, TRANSFORMERS: lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)}


def _change(more: Sequence[float]) -> str:
    factor = math.exp(statistics.fmean(more))
    change = f"{100 * (factor - 1):+.2f}%"
    return change if len(more) < 2 else f"{change} ± {100 * factor * statistics.stdev(more) / math.sqrt(len(more)):.2f}"


def _name(setting: str) -> str:
    return str(json.loads(Path(setting).read_text())["budget"]) if setting.endswith(".json") else setting


def _model(decoder: Decoder, options: argparse.Namespace) -> str:
    yarn = f" with YaRN (factor {options.yarn:g})" if options.yarn else ""
    dtype = str(decoder.model.dtype).removeprefix("torch.")
    return f"{options.name}{yarn}, {len(decoder.layers)} layers converted, {dtype}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _write(
    part: str, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], notes: str, options: argparse.Namespace
) -> None:
    name = options.name.lower().replace(" ", "_")
    shown = {str(options.model): "MODEL", str(options.texts): "TEXTS"}
    arguments = " ".join(shown.get(word, Path(word).name if Path(word).exists() else word) for word in sys.argv[1:])
    write_table(
        f"long_context_{part}_{name}",
        f"{title}: {options.name}",
        [("", header, rows)],
        notes,
        command=f"python -m benchmarks.long_context {arguments}",
    )


PARTS = {"search": search, "quality": quality, "needles": needles, "prefill": prefill, "decode": decode}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--name", help="name of the model in the table")
    parser.add_argument("--gguf", help="name of a GGUF file in this folder")
    parser.add_argument("--yarn", type=float, help="factor by which YaRN scales positions, for long texts")
    parser.add_argument("--texts", type=Path, required=True, help="file with tokens")
    parser.add_argument("--count", type=int, help="number of texts of every kind; all by default")
    parser.add_argument("--length", type=int, default=8192, help="number of tokens per text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="numbers of tokens per text")
    parser.add_argument("--skip", type=int, default=1024, help="number of tokens at the beginning that are not judged")
    parser.add_argument("--needles", type=int, default=16, help="number of facts to hide and to ask for")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="numbers of sequences")
    parser.add_argument("--repeats", type=int, default=7, help="number of timed passes")
    parser.add_argument("--budget", default="perplexity +0.5%", help="budget of the search")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/search/best.json"), help="file for the result of the search"
    )
    parser.add_argument("--settings", nargs="+", default=["1/256"], help="thresholds, or files of a budget search")
    options = parser.parse_args()
    options.name = options.name or options.model.name
    return options


if __name__ == "__main__":
    chosen = arguments()
    PARTS[chosen.part](Decoder(chosen.model, chosen.gguf, chosen.yarn), chosen)
