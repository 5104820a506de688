"""Sphinx's settings. ``python -m sphinx -W --keep-going -b html docs build/docs`` builds the site from these pages.

The pages are Markdown that a forge shows as well: links go to files, and to sections by the names that GitHub gives
them. With ``-W`` a link to a missing page, file or section fails the build.
"""

import sparklog

project = "sparklog"
version = release = sparklog.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

# Names are shown without their modules: users import all of them from ``sparklog``.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"sparklog {release}"
html_static_path = ["_static"]
html_css_files = ["sparklog.css"]
html_copy_source = False
html_show_sphinx = False
