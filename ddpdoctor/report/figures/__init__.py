"""The report's charts as figures of plotly: for notebooks and dashboards, and for the interactive charts of the HTML report.

They draw the same numbers as the SVG: the functions ``*_data`` of ``report/charts`` give those to both. What is drawn is plain
data in plotly's own words (:mod:`~ddpdoctor.report.figures.spec`), so that nothing here needs the package plotly but
:func:`~ddpdoctor.report.figures.plotly_bundle.figures`.
"""
