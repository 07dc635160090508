"""Weight decay on norms against none (Jia et al. 2018, section 3.2)."""

from experiments.harness.claims import Experiment
from experiments.studies.goyal import better_claims, on_and_off_arms

CHOICE_NAMES = ("norms free", "norms decay")

EXPERIMENT = Experiment(
    name="norm_decay",
    title="5. No weight decay on norms against decay",
    description=(
        "Goyal's recipe on a small scale (goyal.py) at both batches, with a weight decay of 5e-4. The arms differ only "
        "in whether it applies to the weights and biases of the norms."
    ),
    arms=on_and_off_arms("norm_decay", (False, True), CHOICE_NAMES),
    claims=better_claims(
        CHOICE_NAMES,
        (
            'top-5 "93.2 -> 93.48" (the 2018 trainer\'s comment)',
            "at 65,536 with LARS the baseline was reached only without decay on norms and biases",
        ),
    ),
)
