"""The gallery's pictures: each panel of a figure must show something when its block of code ends."""

from matplotlib import pyplot as plt
from sphinx.errors import ExtensionError
from sphinx_gallery.scrapers import matplotlib_scraper


def empty_panels(figure) -> int:
    """How many visible axes of a figure have neither data nor text."""
    return sum(axes.axison and not axes.has_data() and not axes.texts for axes in figure.axes)


def scraper(block, block_vars, gallery_conf, **kwargs) -> str:
    """Save the figures of one block of an example, as sphinx-gallery does, and refuse empty panels."""
    for number in plt.get_fignums():
        if empty := empty_panels(plt.figure(number)):
            raise ExtensionError(
                f"{block_vars['src_file']}: {empty} panel(s) of a figure are empty at the end of the block of code "
                "that makes it; draw them in the same block"
            )
    return matplotlib_scraper(block, block_vars, gallery_conf, **kwargs)
