"""`megatron-ds report`: one HTML file about runs, from their metrics.jsonl.

recorded_run    a folder or file → `Run`: its records, settings and environment
goodput         records → how the wall time was spent
reduction       records → the numbers of a run; settings that differ between runs
paragraph       a run in a few sentences
drawing         curves, by matplotlib
page            all of it as HTML, by the template page.html with page.css
command         the flags
"""
