"""Nested signals, their domains, batches of them, and readers that build them from files and Python objects."""

from typing import TYPE_CHECKING

from hsa.exports import lazy

if TYPE_CHECKING:
    from hsa.signals.batch import Batch as Batch
    from hsa.signals.batch import collate as collate
    from hsa.signals.batch import uncollate as uncollate
    from hsa.signals.domains import Domain as Domain
    from hsa.signals.domains import Graph as Graph
    from hsa.signals.domains import Grid as Grid
    from hsa.signals.domains import Sequence as Sequence
    from hsa.signals.domains import Set as Set
    from hsa.signals.domains import Table as Table
    from hsa.signals.readers.files import read_file as read_file
    from hsa.signals.readers.files import text_of as text_of
    from hsa.signals.readers.html import read_html as read_html
    from hsa.signals.readers.html import read_site as read_site
    from hsa.signals.readers.image import read_image as read_image
    from hsa.signals.readers.json_document import read_json as read_json
    from hsa.signals.readers.markdown import read_markdown as read_markdown
    from hsa.signals.readers.nested import from_nested as from_nested
    from hsa.signals.readers.python_source import read_python as read_python
    from hsa.signals.readers.rows import Rows as Rows
    from hsa.signals.readers.rows import load_rows as load_rows
    from hsa.signals.readers.rows import read_row as read_row
    from hsa.signals.readers.text import read_text as read_text
    from hsa.signals.readers.text import read_text_file as read_text_file
    from hsa.signals.readers.tokens import load_tokenizer as load_tokenizer
    from hsa.signals.readers.tokens import train_tokenizer as train_tokenizer
    from hsa.signals.signal import Leaf as Leaf
    from hsa.signals.signal import Signal as Signal
    from hsa.signals.windows import in_windows as in_windows

_HOMES = {
    "hsa.signals.batch": "Batch collate uncollate",
    "hsa.signals.domains": "Domain Graph Grid Sequence Set Table",
    "hsa.signals.readers.files": "read_file text_of",
    "hsa.signals.readers.html": "read_html read_site",
    "hsa.signals.readers.image": "read_image",
    "hsa.signals.readers.json_document": "read_json",
    "hsa.signals.readers.markdown": "read_markdown",
    "hsa.signals.readers.nested": "from_nested",
    "hsa.signals.readers.python_source": "read_python",
    "hsa.signals.readers.rows": "Rows load_rows read_row",
    "hsa.signals.readers.text": "read_text read_text_file",
    "hsa.signals.readers.tokens": "load_tokenizer train_tokenizer",
    "hsa.signals.signal": "Leaf Signal",
    "hsa.signals.windows": "in_windows",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)
