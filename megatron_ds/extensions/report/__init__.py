"""`megatron-ds report`: one HTML file about runs, from their metrics.jsonl.

recorded_run    a folder or file → `Run`: its records, settings and environment
goodput         records → how the wall time was spent
reduction       records → the numbers of a run; settings that differ between runs
paragraph       a run in a few sentences
drawing         curves, by matplotlib
page            all of it as HTML, by the template page.html with page.css
command         the flags
run_summary     an observer that records what a run trains

Note: what libraries do. matplotlib draws curves and PNG files, jinja2 (which torch requires) makes the page and escapes
its texts, rich lays out the view of `watch`. Pictures of schedules (`picture`) and of context parallelism
(`draw_context`) are SVG of our own. matplotlib would save 209 of 1,782 nodes of the one and about 150 of 668 of the
other, but a picture would need an extra and lose the tip of each box, and its bytes would change with the version of
matplotlib, while tests compare the pictures of the pages with what their commands write today.
"""
