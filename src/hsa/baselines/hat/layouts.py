"""Layer orders of Hierarchical Attention Transformers. Does not import torch, so that the command line starts fast."""

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
"""Layouts of the models that the authors compare, by name (github.com/coastalcph/hierarchical-transformers)."""


def layout_pattern(layout: str, layers: int) -> str:
    """Return the order of layers as a string: S for a layer inside segments, C for one across segments.

    Args:
        layout: "ad-hoc" (all S, then C), "interleaved" (pairs SC throughout), "early" (pairs, then S), "late" (S, then
            pairs), the name of a published layout (I1, I2, I3, EC1, EC2, LC1, LC2), or the pattern itself.
        layers: Number of S layers; ignored for published layouts and patterns. Ad-hoc, early and late layouts have a third
            as many C, rounded up.

    >>> for style in STYLES:
    ...     print(style, layout_pattern(style, 6))
    ad-hoc SSSSSSCC
    interleaved SCSCSCSCSCSC
    early SCSCSSSS
    late SSSSSCSC

    Raises:
        InvalidInput: If the name is unknown, or the pattern has other letters or no S.
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
            got=repr(layout),
            expected=f"{', '.join(STYLES)}, a published layout ({', '.join(PUBLISHED)}), or a pattern of S and C",
            fix='Write S for a layer inside segments and C for one across them, such as "SSCSSC"',
        )
    return pattern
