"""Experiments of Frerix, Möllenhoff, Moeller and Cremers, *Proximal Backpropagation*, ICLR 2018."""
