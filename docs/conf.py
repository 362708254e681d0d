"""Configuration of the documentation: `make docs` builds it offline into build/docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import thrifty
from generator import write_pages

project, author = "Thrifty", "the Thrifty authors"
version = release = thrifty.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_static"]
smartquotes = False  # -- is an option of a command, not a dash
nitpicky = True  # a link that leads nowhere is a warning, and `make docs` fails on warnings
html_theme = "furo"
html_title = "Thrifty"
html_static_path = ["_static", "generated/theme.css"]
html_css_files = ["theme.css", "thrifty.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"

write_pages(Path(__file__).parent / "generated")
