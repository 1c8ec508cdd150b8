"""Your own tree: attention along the structure of the data instead of along one long line.

    python examples/own_tree.py

The data here is a JSON document; yours may be anything with parts inside parts. All that is needed is the parent of
every node.
"""

import json

import torch

import hsa

DOCUMENT = """{"title": "Atlas", "chapters": [
  {"name": "Rivers", "words": ["the", "Nile", "flows", "north"]},
  {"name": "Peaks", "words": ["snow", "stays", "all", "year"], "photo": "alps.png"}]}"""


def tree_of(value) -> tuple[hsa.Hierarchy, list[str]]:
    """Return the tree of nested lists and dicts, and the text of every leaf."""
    parents: list[int] = []
    leaves: list[str] = []

    def add(part, parent: int) -> None:
        number = len(parents)
        parents.append(parent)
        if isinstance(part, (dict, list)):
            for child in part.values() if isinstance(part, dict) else part:
                add(child, number)
        else:
            leaves.append(str(part))

    add(value, -1)  # a root has no parent
    return hsa.Hierarchy.from_parents(parents), leaves


def main() -> None:
    torch.manual_seed(0)
    tree, leaves = tree_of(json.loads(DOCUMENT))
    print(tree.show())

    x = torch.randn(len(leaves), 64)  # one vector per leaf; use your embedding
    layer = hsa.nn.HierarchicalEncoderLayer(64, 4).eval()
    print("\noutput:", tuple(layer(x, tree).shape))

    _, weights = layer.self_attn(x, hierarchy=tree, need_weights=True)
    row = leaves.index("Nile")
    print("\nweights of 'Nile':")
    for leaf, weight in zip(leaves, weights[row].tolist(), strict=True):
        print(f"  {leaf:<10} {weight:.3f}")

    two = hsa.Hierarchy.collate([tree, tree])  # a batch of documents: trees side by side, no padding
    print("\nbatch of two:", tuple(layer(torch.cat([x, x]), two).shape))


if __name__ == "__main__":
    main()
