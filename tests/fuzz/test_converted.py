"""Random inputs to converted models of every family: with every group exact, the outputs are those of the exact model."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.huggingface import convert, revert
from tests.huggingface.tiny_models import DECODERS, FAMILIES, random_ids, run, tiny

MODELS = {name: tiny(name) for name in FAMILIES if name not in ("bart", "vit")}


@settings(max_examples=25)
@given(
    family=st.sampled_from(sorted(MODELS)),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    side=st.sampled_from(["left", "right"]),
    kind=st.sampled_from(["clustered", "multiscale"]),
    branching=st.sampled_from([(4, 2), (2, 2), (8, 3), (3, 5)]),
    causal=st.sampled_from([{"threshold": 1e-30}, {"top_k": 999}]),
    shape=st.sampled_from([(4, 2, 2), (2, 2, 2), (8, 4, 2), (8, 8, 4)]),
    tile=st.sampled_from([1, 2, 8]),
)
def test_every_group_exact_is_the_exact_model(family, lengths, seed, side, kind, branching, causal, shape, tile):
    model = MODELS[family]
    ids, mask = random_ids(lengths, seed, side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family in DECODERS:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    exact = run(model, **inputs)
    if family in DECODERS:
        convert(model, kind=kind, branching=shape, tile=tile, **causal)
    else:
        convert(model, kind=kind, branching=branching, top_k=999)
    try:
        out = run(model, **inputs)
    finally:
        revert(model)
    tokens = mask.bool()
    torch.testing.assert_close(out[tokens], exact[tokens], rtol=1e-8, atol=1e-8)
