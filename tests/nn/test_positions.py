import pytest
import torch
from hypothesis import given, settings

from hsa.errors import InvalidInput
from hsa.nn.positions import FourierFeatures, PositionFeatures, PositionProjection
from hsa.signals import Graph, Grid, Set, Signal, Table
from hsa.signals.batch import collate
from hsa.tree.positions import KINDS
from tests.model_inputs import KEYS, exact, position_of_nodes, readable

WIDTH, HEADS, DIM = 14, 3, 5


@settings(max_examples=20)
@given(readable())
def test_every_node_has_the_projected_features_of_its_position(listed):
    features = exact(PositionFeatures(WIDTH, KINDS, KEYS))
    projection = exact(PositionProjection(features.widths, HEADS, DIM), seed=5)
    positions = collate(listed).positions

    def ε(position):
        if position is None:
            return torch.zeros(HEADS, DIM, dtype=torch.float64)
        kind, value = position
        if kind == "table":
            vector = features.key_vectors.weight[KEYS.index(value)]
        else:
            vector = torch.tensor(value, dtype=torch.float64)
            if kind != "graph":
                phase = vector @ features.fourier[kind].frequencies
                vector = torch.cat([phase.sin(), phase.cos()])
        return (projection.maps[kind].weight @ vector).view(HEADS, DIM)

    wanted = torch.stack([ε(position) for position in position_of_nodes(positions)])
    torch.testing.assert_close(projection(features(positions), positions.row), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("inputs", [1, 3])
def test_large_indices_survive_autocast(inputs):
    """Check positions that half precision cannot tell apart, such as 256 and 257."""
    features = FourierFeatures(inputs, WIDTH)
    numbers = torch.arange(2003.0)[:, None].expand(-1, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        halved = features(numbers)
    torch.testing.assert_close(halved.float(), features(numbers), rtol=0, atol=0.01)


def test_one_coordinate_starts_with_the_sinusoids_of_the_transformer():
    index = torch.arange(11.0)
    features = FourierFeatures(1, WIDTH)(index[:, None])
    for wave in range(WIDTH // 2):
        phase = index / 10_000 ** (2 * wave / WIDTH)
        torch.testing.assert_close(features[:, wave], phase.sin())
        torch.testing.assert_close(features[:, WIDTH // 2 + wave], phase.cos())


@pytest.mark.parametrize("domain", [Grid((2, 1)), Graph(2, [(0, 1)]), Table(["title", "body"])])
def test_a_kind_that_the_model_does_not_have(domain):
    positions = collate([Signal.of([3, 1], "text", domain)]).positions
    kind = type(domain).__name__.lower()
    message = rf"positions: expected only sequence, .*, got members of a {kind}. Add '{kind}' to the kinds"
    with pytest.raises(InvalidInput, match=message):
        PositionFeatures(WIDTH, ("sequence",))(positions)


def test_sets_need_no_kind():
    positions = collate([Signal.of([3, 1], "text", Set(2))]).positions
    features = PositionFeatures(WIDTH, ("sequence",))
    assert not PositionProjection(features.widths, HEADS, DIM)(features(positions), positions.row).any()


def test_unknown_kinds_and_keys():
    with pytest.raises(InvalidInput, match=r"kinds: expected some of.*, got \['line'\]"):
        PositionFeatures(WIDTH, ("sequence", "line"))
    positions = collate([Signal.of([3, 1], "text", Table(["title", "odd"]))]).positions
    with pytest.raises(InvalidInput, match=r"table: expected one of \(.*'title'.*\), got the key 'odd'"):
        PositionFeatures(WIDTH, ("table",), KEYS)(positions)
