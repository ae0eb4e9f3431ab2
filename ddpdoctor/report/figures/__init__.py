"""The report's charts as plotly figures: for notebooks and dashboards, and for the interactive charts of the HTML report.

They show the same numbers as the SVG charts, from the functions ``*_data`` of ``report/charts``. Figures are plain data in plotly's
JSON format (:mod:`~ddpdoctor.report.figures.spec`). Only :func:`~ddpdoctor.report.figures.specs.figures` needs the package plotly.
"""
