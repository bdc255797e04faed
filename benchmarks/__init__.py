"""``make bench``: what a decision costs, beside a bare Redis call and beside other packages. Results: RESULTS.md."""
