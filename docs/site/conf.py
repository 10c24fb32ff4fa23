"""Settings of Sphinx for the documentation site, which `make site` builds from a copy of the pages."""

import sys
from pathlib import Path

from megatron_ds.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "megatron_ds"
release = __version__
author = "the authors of megatron_ds"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "plain_docstrings",
]
source_suffix = {".md": "markdown"}

# Links to headings have GitHub's names, so that pages work there, too.
myst_heading_anchors = 6
# Two hyphens begin a flag.
smartquotes = False
# Tables and diagrams of docstrings.
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"megatron_ds {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
# A page without a server cannot fetch others for summaries of what was found.
html_show_search_summary = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
