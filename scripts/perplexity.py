"""`kv-hf eval` with the packaged models, and the caches of others at their best.

    python scripts/perplexity.py --model smollm2-135m
    python scripts/perplexity.py --model ./my-model --text essay.txt --windows 7 --caches paged_int4 hqq_int4_channel
    python scripts/perplexity.py --text dataset:Salesforce/wikitext,wikitext-2-raw-v1,test,text --window 2048

With --record the rows are appended to results/perplexity.jsonl.
"""

import sys
from collections.abc import Sequence

from measure.models.packaged import PACKAGED, packaged_model
from measure.peers import known_peers
from measure.quality import PEERS
from measure.runner import RESULTS

from kv_hf.evaluation.eval_command import evaluate
from kv_hf.formats import cache_names
from kv_hf_cli import command_parser

PROG = "perplexity.py"


@known_peers()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when every cache could be measured, 1 when some could not, 2 for bad arguments."""
    asked = command_parser("eval", PROG)
    asked.description = f"{asked.description} Packaged models: {', '.join(PACKAGED)}."
    asked.set_defaults(model="smollm2-135m", out=RESULTS / "perplexity.jsonl")
    for action in asked._actions:
        action.required = False
    args = asked.parse_args(argv)
    args.caches = args.caches or [*cache_names(), *PEERS]
    return evaluate(args, PROG, packaged_model)


if __name__ == "__main__":
    sys.exit(main())
