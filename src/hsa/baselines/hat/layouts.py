"""In which order the layers of a Hierarchical Attention Transformer stand. Without torch, for the command line."""

from __future__ import annotations

from hsa.errors import InvalidInput

STYLES = ("ad-hoc", "interleaved", "early", "late")
PUBLISHED = {
    "I1": "SC" * 6,
    "I2": "SSCC" * 3,
    "I3": "SSC" * 4,
    "EC1": "SSSCC" + "SSCC" + "SSS",
    "EC2": "SS" + "SC" * 3 + "SSSS",
    "LC1": "SSSSSS" + "SC" * 3,
    "LC2": "SSSSS" + "SCC" + "SSCC",
}
"""The twelve-layer models that the authors compare, by their names (github.com/coastalcph/hierarchical-transformers)."""


def layout_pattern(layout: str, layers: int) -> str:
    """The order of layers: S inside segments, C across segments.

    Args:
        layout: "ad-hoc" (all S, then C), "interleaved" (pairs SC throughout), "early" (pairs, then S), "late" (S, then
            pairs), the name of a published one (I1, I2, I3, EC1, EC2, LC1, LC2), or the pattern itself.
        layers: how many S; a pattern has its own number. Ad-hoc, early and late layouts have a third as many C, rounded
            up.

    >>> for style in STYLES:
    ...     print(style, layout_pattern(style, 6))
    ad-hoc SSSSSSCC
    interleaved SCSCSCSCSCSC
    early SCSCSSSS
    late SSSSSCSC

    Raises:
        InvalidInput: another name, a pattern of other letters or without S.
    """
    third = -(-layers // 3)
    styles = {
        "ad-hoc": "S" * layers + "C" * third,
        "interleaved": "SC" * layers,
        "early": "SC" * third + "S" * (layers - third),
        "late": "S" * (layers - third) + "SC" * third,
    }
    pattern = (styles | PUBLISHED).get(layout, layout)
    if not isinstance(pattern, str) or not set(pattern) <= {"S", "C"} or "S" not in pattern:
        raise InvalidInput(
            "layout",
            given=repr(layout),
            expected=f"{', '.join(STYLES)}, a published one ({', '.join(PUBLISHED)}), or a pattern of S and C",
            fix='write S for a layer inside segments and C for one across them, such as "SSCSSC"',
        )
    return pattern
