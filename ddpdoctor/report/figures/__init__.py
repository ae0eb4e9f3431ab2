"""The report's charts as figures of plotly: for notebooks and dashboards, and for the interactive charts of the HTML report.

They show the same numbers as the SVG charts, from the functions ``*_data`` of ``report/charts``. Figures are plain data in plotly's
JSON format (:mod:`~ddpdoctor.report.figures.spec`); only :func:`~ddpdoctor.report.figures.specs.figures` needs the package
plotly.
"""
