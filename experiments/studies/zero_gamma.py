"""Initializing the last norm of each residual block with 0 against 1 (Goyal et al. 2017, table 2b)."""

from experiments.harness.claims import Experiment
from experiments.studies.goyal import better_claims, on_and_off_arms

CHOICE_NAMES = ("gamma 0", "gamma 1")

EXPERIMENT = Experiment(
    name="zero_gamma",
    title="4. Zero-gamma against ones",
    description=(
        "Goyal's recipe on a small scale (goyal.py) at both batches. The arms differ only in the initial weight of the "
        "last norm in each of the four residual blocks."
    ),
    arms=on_and_off_arms("zero_gamma", (True, False), CHOICE_NAMES),
    claims=better_claims(
        CHOICE_NAMES,
        (
            "top-1 error 23.60 ± 0.12 against 23.84 ± 0.18 % at 256 (table 2b)",
            "23.74 ± 0.09 against 24.11 ± 0.07 % at 8192",
        ),
    ),
)
