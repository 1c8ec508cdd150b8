"""A whole encoder before and after conversion, at 8,192 to 32,768 tokens.

It has ModernBERT's architecture with rotary positions, all of its twelve layers global, and random weights.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure import check, medians, write_table
from hsa.analysis.memory import extra_memory
from hsa.huggingface import convert, counting, revert

LENGTHS = (8192, 16384, 32768)
LAYERS, WIDTH, HEADS = 12, 768, 12
WAYS: dict[str, dict[str, Any]] = {
    "hierarchical (16, 8, 8, 16)": {"operator": "hierarchical", "hierarchy": "windows", "branching": (16, 8, 8, 16)},
    "windows of 16, near 1, refine 2": {
        "hierarchy": "windows",
        "branching": (16, 4),
        "near": 1,
        "refine": 2,
        "beam": 8,
    },
    "found, groups of 8, 16 open, shared by 16 queries": {
        "branching": (8, 2),
        "refine": 16,
        "beam": 16,
        "share": 16,
        "chunk": 512,
    },
}


def encoder(
    device: str, dtype: torch.dtype, layers: int = LAYERS, width: int = WIDTH, longest: int = LENGTHS[-1]
) -> Any:
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        vocab_size=1024,
        hidden_size=width,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        max_position_embeddings=longest,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    torch.manual_seed(0)
    return ModernBertModel(config).eval().to(device, dtype)


def check_correctness(model: Any, device: str) -> None:
    """With every family open, the converted encoder is the exact one."""
    ids = torch.randint(3, 1024, (2, 640), device=device)
    mask = torch.ones_like(ids)
    mask[1, 500:] = 0
    exact = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    for branching, refine in (((16, 2), 39), ((8, 4), 79)):  # one family of the longer text stays pooled
        convert(model, hierarchy="keys", branching=branching, refine=refine)
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
        ids = torch.randint(3, 1024, (1, length), device=device)

        def step(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids)
            torch.cuda.synchronize()

        exact = medians({"exact": step}, repeats=9)["exact"]
        rows.append([f"{length:,}", "exact (SDPA)", exact, 1.0, 1.0, extra_memory(step, device)])
        for name, settings in WAYS.items():
            convert(model, **settings)
            step()
            with counting() as counted:
                step()
            ms = medians({name: step}, repeats=9)[name]
            rows.append([f"{length:,}", name, ms, exact / ms, counted.ratio, extra_memory(step, device)])
            revert(model)
    write_table(
        "converted_encoder",
        "A converted encoder, end to end",
        [("", ["tokens", "attention", "ms", "times faster", "times fewer operations of attention", "MiB"], rows)],
        f"ModernBERT's architecture with all {LAYERS} layers global, {HEADS} heads × {WIDTH // HEADS}, bfloat16, random weights, "
        "one sequence, forward. Embeddings, feed-forward networks and norms are the same in all rows. MiB: beyond the weights.",
    )
