"""Applies rules to the measured facts and returns findings, their order, the verdict and the :class:`.diagnosis.Diagnosis`.

``load`` reads rule files, ``rule`` checks them, ``engine`` evaluates them, ``verdict`` sorts the findings and chooses the first
sentence of a report. All thresholds are in the rule files.

Modules, in the order of a diagnosis:

    rules       load, rule_cache, template_cache, rule, conditions, config, selftest, frameworks (settings of Lightning and others)
    facts       facts_view, rule_texts (filters for texts), rewording (for few ranks), worker_count
    findings    engine, verdict
    result      diagnosis, trials
"""
