"""``make bench``: what a decision costs, beside a bare Redis call and beside other packages. Results: RESULTS.md."""

import os
import sys

# hiredis is there to be measured; whoever installs redis-py alone has none, so that is the rule here.
if not os.environ.get("RATEQUOTA_BENCH_HIREDIS"):
    sys.modules["hiredis"] = None  # type: ignore[assignment]
