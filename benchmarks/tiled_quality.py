"""Perplexity of a pre-trained decoder with `hsa.clustered_attention` in all layers, without training.

    python -m benchmarks.tiled_quality MODEL --gguf NAME --texts TEXTS --length 8192 --skip 1024 \
        --settings threshold=1/256,spread=1 top_k=16 --out table.md

MODEL is a folder with a causal language model (full attention in all layers), TEXTS a folder with `*.txt` or a file with
tokens: `torch.save` of integers `[texts, tokens]`, or of a dict of them by kind of text. Each text needs one token more than
`--length`. Exact attention is always measured first. Settings are the options of `hsa.clustered_attention`: threshold,
top_k, spread, share_lists, windows, branching (such as 8x8x4), tile, backend.

With `--last M`, all rows but the last M attend exactly, and only the last M are judged. With `--needles N`, facts are hidden
at N depths of the first text, and the model is asked for each of them; all rows but the last 256 or more attend exactly.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hsa
from benchmarks.needles import Question, questions_of
from hsa.attention.clustered.layout import TILE, WIDEST_TILE
from hsa.attention.clustered.selection import TileSelection, intervals_of

NAME = "tiled"
"""Name of the attention implementation for transformers."""
SLICE = 1024
"""Number of tokens whose logits are computed at once."""
COUNTED_LAYERS = 5
"""Lists are counted in every fifth layer."""
NEEDLE_ROWS = 256
"""Minimum number of rows that attend by the operator when the model is asked for a fact."""
KINDS: Mapping[str, Any] = {
    "threshold": lambda text: float(Fraction(text)),
    "spread": lambda text: float(Fraction(text)),
    "top_k": int,
    "tile": int,
    "share_lists": lambda text: bool(int(text)),
    "windows": lambda text: bool(int(text)),
    "branching": lambda text: tuple(int(size) for size in text.split("x")),
    "backend": str,
}
Settings = dict[str, Any]
Packed = tuple[Tensor, Tensor, Tensor]
"""q, k and v of one layer: `[tokens, heads, dim]`."""


def parse(text: str) -> Settings:
    """Return the options of a setting.

    >>> parse("threshold=1/256,windows=1")
    {'threshold': 0.00390625, 'windows': True}
    """
    settings = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in KINDS or not value:
            raise SystemExit(f"--settings {text}: expected name=value with names from {', '.join(KINDS)}, got {part!r}")
        try:
            settings[name] = KINDS[name](value)
        except ValueError as error:
            raise SystemExit(f"--settings {text}: {name}: {error}") from None
    return settings


class Attention:
    """The attention function of all layers.

    Attributes:
        settings: Options of `hsa.clustered_attention`; None for exact attention.
        start: First row that attends by the operator; earlier rows attend exactly.
        record: Layers whose q, k and v are kept during a pass.
        recorded: q, k and v of these layers.
    """

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.start = 0
        self.record: Sequence[int] = ()
        self.recorded: dict[int, Packed] = {}

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return `[1, tokens, heads, dim]` from `[1, heads, tokens, dim]`."""
        rows, window = query.shape[2], others.get("sliding_window")
        if attention_mask is not None or len(query) != 1 or rows != key.shape[2]:
            raise SystemExit("expected passes over one whole text, without a mask or a cache")
        if window is not None and window < rows:
            raise SystemExit(f"layer {module.layer_idx} has a window of {window} tokens, expected full attention")
        if module.layer_idx in self.record:
            self.recorded[module.layer_idx] = packed(query), packed(key), packed(value)
        start = rows if self.settings is None else self.start
        parts = []
        if start:
            q, k, v = (x[:, :, :start] for x in (query, key, value))
            exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            parts.append(exact.transpose(1, 2))
        if self.settings is not None:
            q, k, v = packed(query[:, :, start:]), packed(key), packed(value)
            out = hsa.clustered_attention(q, k, v, query_lengths=[len(q)], causal=True, scale=scaling, **self.settings)
            parts.append(out[None])
        return torch.cat(parts, 1), None


def packed(x: Tensor) -> Tensor:
    """Return `[tokens, heads, dim]` from `[1, heads, tokens, dim]`."""
    return x[0].transpose(0, 1).contiguous()


class Decoder:
    """A causal language model whose layers all call one `Attention`."""

    def __init__(self, folder: Path, gguf: str | None, device: str, yarn: float | None = None):
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.attention = Attention()
        AttentionInterface.register(NAME, self.attention)
        self.folder, self.device, self.files = folder, device, {"gguf_file": gguf} if gguf else {}
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        config: Any = AutoConfig.from_pretrained(folder, **self.files)
        if yarn is not None:
            known = {
                "rope_type": "yarn",
                "factor": yarn,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
            config.rope_parameters = {**config.rope_parameters, **known}
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=NAME, **self.files
        )
        self.model = model.eval().to(device)
        self.layers = int(model.config.num_hidden_layers)
        self.head = self.model.get_output_embeddings().weight.detach().float()
        self.seconds = 0.0

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, **self.files)

    @torch.inference_mode()
    def hidden(self, row: Tensor) -> Tensor:
        """Return the last hidden states of one text, and store the seconds of the pass."""
        self._wait()
        began = time.perf_counter()
        states = self.model.get_decoder()(input_ids=row[None].to(self.device).long(), use_cache=False)
        self._wait()
        self.seconds = time.perf_counter() - began
        return states.last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.head)

    def loss(self, row: Tensor, begin: int) -> float:
        """Return the mean loss of the predictions made at tokens from `begin` on; the last token is only predicted."""
        hidden, target = self.hidden(row[:-1])[begin:], row[begin + 1 :].to(self.device).long()
        pairs = zip(hidden.split(SLICE), target.split(SLICE), strict=True)
        return sum(float(F.cross_entropy(self.logits(h), t, reduction="sum")) for h, t in pairs) / len(target)

    def keep(self, row: Tensor, layers: Sequence[int]) -> dict[int, Packed]:
        """Return q, k and v of some layers in a pass with exact attention."""
        self.attention.settings, self.attention.record, self.attention.recorded = None, layers, {}
        self.hidden(row)
        self.attention.record = ()
        return self.attention.recorded

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def read_texts(path: Path, length: int, count: int | None, decoder: Decoder) -> list[tuple[str, Tensor]]:
    """Return (kind, tokens) of the texts, `length` + 1 tokens each."""
    if path.is_dir():
        tokenizer = decoder.tokenizer()
        files = [file.read_text() for file in sorted(path.glob("*.txt"))]
        rows = [torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int32) for text in files]
        kinds: Mapping[str, Any] = {"": [row for row in rows if len(row) > length]}
    else:
        loaded = torch.load(path, weights_only=True)
        kinds = loaded if isinstance(loaded, dict) else {"": loaded}
    texts = [(kind, row[: length + 1]) for kind, rows in kinds.items() for row in rows[:count]]
    if not texts or any(len(row) <= length for _, row in texts):
        raise SystemExit(f"{path}: expected texts of {length + 1:,} tokens or more")
    return texts


@torch.inference_mode()
def list_lengths(layers: Mapping[int, Packed], settings: Settings, start: int) -> tuple[float, float]:
    """Return the mean numbers of listed keys and of pooled rows, per tile and list, for queries from `start` on."""
    clustering = {name: value for name, value in settings.items() if name in ("windows", "branching")}
    rule = {name: value for name, value in settings.items() if name not in clustering}
    keys, pooled, lists = 0, 0, 0
    for q, k, v in layers.values():
        lengths, queries = [len(k)], q[start:]
        clustered = hsa.cluster(k, v, lengths, **clustering)
        selection = hsa.select_groups(queries, k, clustered, lengths, query_lengths=[len(queries)], causal=True, **rule)
        entries = entries_of(selection)
        keys += entries[0]
        pooled += sum(entries[1:])
        lists += selection.layout.num_tiles * selection.lists
    return keys / lists, pooled / lists


def entries_of(selection: TileSelection) -> tuple[int, int, int, int]:
    """Return the numbers of listed keys, groups, nodes and chunks of all lists together."""
    layout = selection.layout
    totals = torch.zeros(4, dtype=torch.int64, device=selection.first.device)
    for tile in range(layout.num_tiles):
        rows = int(layout.tile_row[tile + 1] - layout.tile_row[tile])
        intervals = intervals_of(selection.tile(tile), layout, rows)
        for level, (begin, end) in enumerate(zip(intervals.begin, intervals.end, strict=True)):
            totals[level] += (begin < end).sum()
    totals[0] *= layout.shape.group
    keys, groups, nodes, chunks = totals.tolist()
    return keys, groups, nodes, chunks


def start_of(question: Question) -> int:
    """Return the first row that attends by the operator: the first of a tile of any size."""
    return max(0, (len(question.tokens) - NEEDLE_ROWS) // WIDEST_TILE * WIDEST_TILE)


def is_right(decoder: Decoder, question: Question) -> bool:
    """Return whether every digit of the answer is the most probable token after the ones before it."""
    decoder.attention.start = start_of(question)
    hidden = decoder.hidden(question.tokens)
    before = torch.tensor(question.digits) - 1
    best = decoder.logits(hidden[before.to(hidden.device)]).argmax(-1).cpu()
    return torch.equal(best, question.tokens[list(question.digits)])


@dataclass
class Result:
    """Measurements of one setting.

    Attributes:
        name: Setting as given on the command line, or "exact".
        losses: Mean loss of every text.
        seconds: Median seconds of a pass, without logits.
        lists: Listed keys and pooled rows per tile and list.
        needles: Number of facts found.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: float = math.nan
    lists: tuple[float, float] | None = None
    needles: int | None = None

    @property
    def perplexity(self) -> float:
        """Geometric mean over texts."""
        return math.exp(statistics.fmean(self.losses))

    def change(self, exact: Result, texts: Sequence[int]) -> str:
        """Return the change of the perplexity of some texts in percent, with its standard error over these texts."""
        if self is exact:
            return "–"
        more = [self.losses[i] - exact.losses[i] for i in texts]
        factor = math.exp(statistics.fmean(more))
        change = f"{100 * (factor - 1):+.2f}%"
        if len(more) < 2:
            return change
        return f"{change} ± {100 * factor * statistics.stdev(more) / math.sqrt(len(more)):.2f}"


class Table:
    """Results as lines of text while they come in, and as a Markdown table."""

    def __init__(self, kinds: Sequence[str], questions: int):
        self.texts = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
        self.all, self.questions = range(len(kinds)), questions
        self.results: list[Result] = []

    def cells(self, result: Result) -> list[str]:
        exact = self.results[0]
        keys, pooled = (f"{x:,.0f}" for x in result.lists) if result.lists else ("–", "–")
        cells = [result.name, f"{result.perplexity:.3f}", result.change(exact, self.all), keys, pooled]
        if len(self.texts) > 1:
            cells += [result.change(exact, texts) for texts in self.texts.values()]
        if self.questions:
            cells.append(f"{result.needles}/{self.questions}")
        return [*cells, f"{result.seconds:.3f}"]

    @property
    def header(self) -> list[str]:
        header = ["setting", "perplexity", "change", "keys per tile and list", "pooled rows"]
        header += list(self.texts) if len(self.texts) > 1 else []
        return [*header, *["needles"] * bool(self.questions), "seconds per pass"]

    def add(self, result: Result) -> None:
        self.results.append(result)
        cells = zip(self.header, self.cells(result), strict=True)
        print(" · ".join(cell if head == "setting" else f"{head} {cell}" for head, cell in cells), flush=True)

    def markdown(self, notes: str) -> str:
        rows = [self.header, ["---"] * len(self.header), *(self.cells(result) for result in self.results)]
        return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", notes, ""])


def measure(
    decoder: Decoder,
    name: str,
    texts: Sequence[Tensor],
    questions: Sequence[Question],
    layers: Mapping[int, Packed],
    *,
    begin: int,
    start: int,
) -> Result:
    """Measure one setting: predictions from `begin` on, with the operator from `start` on."""
    settings = None if name == "exact" else parse(name)
    result = Result(name)
    decoder.attention.settings, decoder.attention.start = settings, start
    if decoder.device == "cuda":
        decoder.hidden(texts[0][:-1])  # compiles kernels
    seconds = []
    for row in texts:
        result.losses.append(decoder.loss(row, begin))
        seconds.append(decoder.seconds)
    result.seconds = statistics.median(seconds)
    if questions:
        result.needles = sum(is_right(decoder, question) for question in questions)
    if settings is not None:
        result.lists = list_lengths(layers, settings, -(-begin // WIDEST_TILE) * WIDEST_TILE)
    return result


def main(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    decoder = Decoder(options.model, options.gguf, device, options.yarn)
    texts = read_texts(options.texts, options.length, options.count, decoder)
    print(f"{decoder.layers} layers, {len(texts)} texts, {time.monotonic() - began:.0f} s to load", flush=True)
    start = 0 if options.last is None else options.length - options.last
    begin = options.skip if options.last is None else start
    settings = [parse(name) for name in options.settings]
    for name, setting in zip(options.settings, settings, strict=True):
        if start % setting.get("tile", TILE):
            raise SystemExit(f"--last {options.last}: expected row {start:,} to be the first of a tile, with {name}")
    if not 0 <= begin <= options.length - WIDEST_TILE:
        raise SystemExit(
            f"expected at least {WIDEST_TILE} of {options.length:,} tokens to judge, from token {begin:,} on"
        )
    first = texts[0][1][:-1]
    if options.save_qkv:
        save_qkv(options.save_qkv, decoder.keep(first, options.layers), options)
    if not settings:
        return
    questions = questions_of(first, options.needles, decoder.tokenizer()) if options.needles else []
    counted = decoder.keep(first, range(0, decoder.layers, COUNTED_LAYERS))
    table = Table([kind for kind, _ in texts], len(questions))
    machine = f"one {torch.cuda.get_device_name()}" if device == "cuda" else f"{torch.get_num_threads()} threads"
    dtype = str(counted[0][0].dtype).removeprefix("torch.")
    where = f"the last {options.last:,}" if options.last else f"tokens from {options.skip:,} on"
    notes = (
        f"{options.model.name}, all {decoder.layers} layers, {len(texts)} texts of {options.length:,} tokens, {where}. "
        f"Perplexity is the geometric mean over texts; changes are against exact attention, with their standard error over "
        f"texts. Listed keys (8 per open group, without the exact chunk) and pooled rows are means over every "
        f"{COUNTED_LAYERS}th layer of the first text. Measured on {machine}, torch {torch.__version__}, {dtype}."
    )
    for name in ("exact", *options.settings):
        rows = [row for _, row in texts]
        table.add(measure(decoder, name, rows, questions, counted, begin=begin, start=start))
        if options.out:
            options.out.write_text(table.markdown(notes))
    print(table.markdown(notes), flush=True)


def save_qkv(path: Path, layers: Mapping[int, Packed], options: argparse.Namespace) -> None:
    """Save q, k and v of some layers in bfloat16: a dict of layer → {"q", "k", "v"}, each `[tokens, heads, dim]`."""
    missing = [layer for layer in options.layers if layer not in layers]
    if missing or not layers:
        raise SystemExit(f"--layers: expected numbers of layers of the model, got {options.layers}")
    saved = {
        layer: {name: x.to(torch.bfloat16).cpu() for name, x in zip("qkv", qkv, strict=True)}
        for layer, qkv in layers.items()
    }
    torch.save(saved, path)
    print(f"{path}: layers {', '.join(map(str, saved))}, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--gguf", help="name of a GGUF file in this folder")
    parser.add_argument("--yarn", type=float, help="factor by which YaRN scales positions, for long texts")
    parser.add_argument("--texts", type=Path, required=True, help="folder with *.txt, or file with tokens")
    parser.add_argument("--count", type=int, help="number of texts of every kind; all by default")
    parser.add_argument("--length", type=int, default=8192, help="number of tokens per text")
    parser.add_argument("--skip", type=int, default=1024, help="number of tokens at the beginning that are not judged")
    parser.add_argument(
        "--last", type=int, help="number of tokens at the end that attend by the operator, and are judged"
    )
    parser.add_argument("--needles", type=int, default=0, help="number of facts to hide and to ask for")
    parser.add_argument("--settings", nargs="+", default=[], metavar="NAME=VALUE,…", help="settings to compare")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--save-qkv", type=Path, help="file for q, k and v of the first text")
    parser.add_argument(
        "--layers", type=lambda text: [int(i) for i in text.split(",")], default=[], help="layers to save"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
