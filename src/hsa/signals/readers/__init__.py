"""Readers: build signals from texts, files, web pages, images, tables and Python objects."""

from hsa.signals.readers.files import KINDS, SUFFIXES, read_file, text_of
from hsa.signals.readers.html import read_html, read_site
from hsa.signals.readers.image import read_image
from hsa.signals.readers.json_document import read_json
from hsa.signals.readers.markdown import read_markdown
from hsa.signals.readers.nested import from_nested
from hsa.signals.readers.python_source import definitions, read_python
from hsa.signals.readers.rows import Rows, load_rows, read_row
from hsa.signals.readers.text import read_text, read_text_file, train_tokenizer

__all__ = [
    "KINDS",
    "SUFFIXES",
    "Rows",
    "definitions",
    "from_nested",
    "load_rows",
    "read_file",
    "read_html",
    "read_image",
    "read_json",
    "read_markdown",
    "read_python",
    "read_row",
    "read_site",
    "read_text",
    "read_text_file",
    "text_of",
    "train_tokenizer",
]
