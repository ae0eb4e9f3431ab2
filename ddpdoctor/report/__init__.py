"""Reports: one file per output, all reading the same :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`.

::

    outputs            terminal, html, json_output, markdown, junit, sarif
                       timeline_export  all ranks on one clock            console_output  wraps at spaces only
    content            summary, finding_view, job_view, tables, experiment_view
                       words  numbers, ranks and parts of a step
    the HTML page      charts, figures (packages)
    several runs       compare, compare_settings, history                 runs_output  both, in any form
    read back          read  a diagnosis from a file
    ``--redact``       redaction  what is replaced                        redact_names  names and forms that identify
"""
