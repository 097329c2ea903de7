"""From logits to tokens.

What happens to one sample's logits, in this order, which is vLLM's but for min_p coming after top_k:

1. what can't be drawn becomes -inf: tokens that the mask leaves out, last tokens of bad words, held tokens before
   `min_tokens`;
2. `logit_bias` is added;
3. penalties: repetition, then frequency and presence;
4. temperature (0: the best token, and that is all);
5. filters: top_k, then min_p, then top_p of what these two have left;
6. the draw.

The worker needs rules and past of a sequence for 1 to 3 (`SamplerStates`); masks come with the step. Log-probabilities
that are reported are the model's own, before all of this.

More letters used in shapes: U rows of logits, B samples of one batch.
"""

from pannier.compute.sampling.draw import CannotDraw, draw
from pannier.compute.sampling.report import report, report_drawn
from pannier.compute.sampling.state import State
from pannier.compute.sampling.states import SamplerStates

__all__ = ["CannotDraw", "SamplerStates", "State", "draw", "report", "report_drawn"]
