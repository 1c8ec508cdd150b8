"""Time and memory of a whole encoder before and after conversion, at 8,192 to 32,768 tokens.

The encoder has EuroBERT's architecture (twelve layers, rotary positions) and random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import check, medians, write_table
from hsa.analysis.memory import extra_memory
from hsa.huggingface import convert, counting, revert

LENGTHS = (8192, 16384, 32768)
LAYERS, WIDTH, HEADS = 12, 768, 12
HEADER = [
    "tokens",
    "attention",
    "eager ms",
    "× faster",
    "graph ms",
    "× faster",
    "× fewer operations of attention",
    "MiB",
]
VARIANTS: dict[str, dict[str, Any]] = {
    "hierarchical (16, 8, 8, 16)": {"kind": "hierarchical", "branching": (16, 8, 8, 16)},
    "multiscale, windows of 16, near 1, top_k 2": {
        "kind": "multiscale",
        "branching": (16, 4),
        "near": 1,
        "top_k": 2,
    },
    "clustered, groups of 8, top_k 16, tile 16": {
        "branching": (8, 2),
        "top_k": 16,
        "tile": 16,
    },
    "clustered, threshold 1/64": {"threshold": 1 / 64},
    "windows, threshold 1/64": {"kind": "multiscale", "threshold": 1 / 64},
}


def encoder(
    device: str, dtype: torch.dtype, layers: int = LAYERS, width: int = WIDTH, longest: int = LENGTHS[-1]
) -> Any:
    from transformers import EuroBertConfig, EuroBertModel

    config = EuroBertConfig(
        vocab_size=1024,
        hidden_size=width,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        max_position_embeddings=longest,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        mask_token_id=3,
    )
    torch.manual_seed(0)
    return EuroBertModel(config).eval().to(device, dtype)


def check_correctness(model: Any, device: str) -> None:
    """Check that the converted encoder equals the exact one if (nearly) every group is exact."""
    ids = torch.randint(3, 1024, (2, 640), device=device)
    mask = torch.ones_like(ids)
    mask[1, 500:] = 0
    exact = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    for branching, top_k in (((16, 2), 39), ((8, 4), 79)):  # one group of the longer text stays pooled
        convert(model, kind="clustered", branching=branching, top_k=top_k)
        out = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        revert(model)
        check(f"converted encoder {branching}", out, exact, 5e-2)


@torch.inference_mode()
def run() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    device = "cuda"
    model = encoder(device, torch.bfloat16)
    check_correctness(model, device)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(4, 1024, (1, length), device=device)
        exact = 0.0
        for name, settings in {"exact (SDPA)": None, **VARIANTS}.items():
            if settings is not None:
                convert(model, **settings)
            step = partial(_step, model, ids)
            step()
            with counting() as counted:
                step()
            times = medians({"eager": step, "graph": _graph(model, ids)}, repeats=9)
            exact = exact or min(times.values())
            ratio = 1.0 if settings is None else counted.ratio
            faster = [exact / ms for ms in times.values()]
            rows.append(
                [
                    f"{length:,}",
                    name,
                    times["eager"],
                    faster[0],
                    times["graph"],
                    faster[1],
                    ratio,
                    extra_memory(step, device),
                ]
            )
            revert(model)
    write_table(
        "converted_encoder",
        "A converted encoder, end to end",
        [("", HEADER, rows)],
        f"EuroBERT's architecture: {LAYERS} layers, {HEADS} heads × {WIDTH // HEADS}, bfloat16, random weights, one "
        "sequence, forward. Feed-forward networks, norms and embeddings are the same in all rows. Graph: a CUDA graph of "
        "the whole model, replayed; eager: called from Python. × faster compares with the faster form of exact attention. "
        "That is eager, because in a graph transformers does not drop a mask that hides nothing. MiB: memory beyond the "
        "weights, eager.",
    )


def _step(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids)
    torch.cuda.synchronize()


def _graph(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """Capture the same step as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(input_ids=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        model(input_ids=ids)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay
