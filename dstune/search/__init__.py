"""Find the fastest setting that does not run out of memory by short real trials.

`space` says what there is to choose from, `fitting` what the virtual GPU thinks of it, `strategy` what to try next,
`launch` starts it, `job` is what runs, `diagnose` names how it ended, `journal` keeps it, `session` is the loop.
"""
