"""Charts as plain geometry: percentages, pixels and path data that the templates place into inline SVG.

No script draws them: they are there with JavaScript off, on paper and in a mail client. Coordinates along
the width are percentages
and text keeps its size, so that one drawing serves a desk and a telephone.
"""
