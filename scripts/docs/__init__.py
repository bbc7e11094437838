"""The documentation site: `make docs` builds it into `build/docs/site`, offline, from READMEs, pages and docstrings.

| file | holds |
|---|---|
| `mkdocs.yml` | the configuration; `nav` lists every page |
| `pages/` | pages that belong to no folder of the package, and the API reference |
| `notebooks/` | notebooks without output; the build executes them |
| `theme/` | style sheet and script of the site |
| `sources.py` | the pages of the site and their files in the repository |
| `links.py` | repository links → links of the site |
| `terms.py` | links from terms to the glossary |
| `blocks.py` | tables that pages take from the code (`<!-- generated: NAME -->`) |
| `policy_plots.py` | the plot of β(n) of each policy |
| `model_types.py`, `model_types.csv` | the transformers model types that `attnscale.hf.apply` accepts |
| `notebooks.py` | execute a notebook; convert it to Markdown |
| `doctests.py` | the griffe extension: `>>>` examples in docstrings as code |
| `hooks.py` | the mkdocs hook: joins all of the above |

To add a page, write `pages/NAME.md` or a README beside the code, and list it in `nav` of `mkdocs.yml`. Links are those
of the repository (`../../../attnscale/hf/README.md#train`), so that they work on GitHub too. A new public package needs
`::: package.name` in a page of `pages/reference`. The build and `tests/scripts/test_docs.py` fail if a link is dead, a
README has no page or a public name is missing.
"""
