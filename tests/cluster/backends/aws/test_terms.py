"""The terms of a job, as a tag of its instances."""

import pytest

from cluster.backends.aws.renting.adoption import adopted_options
from cluster.backends.aws.terms.options import AwsOptions
from cluster.backends.aws.terms.rental_spec import RentalSpec, RentalTerms
from cluster.state.spec import MAX_MACHINES
from infra.aws.launch_request import Internet, Place
from train.tools.records import DamagedRecord

MAX_TAG_CHARACTERS = 256  # AWS, "Tag restrictions"
LONGEST = RentalTerms(
    machines=MAX_MACHINES,
    spares=MAX_MACHINES - 1,
    exchanges=MAX_MACHINES,
    hours=99999.9999,
    dollars=999999.99,
    spent=999999.9999,
    at=1795291200,
    start=1795291200,
    internet=Internet.PUBLIC,
    on_demand_spares=MAX_MACHINES - 1,
    late_spares=MAX_MACHINES - 1,
    traffic=(9999.99, 9999.99),
)


def test_longest_terms_fit_into_a_tag_and_come_back() -> None:
    text = LONGEST.to_tag()
    assert len(text) <= MAX_TAG_CHARACTERS and RentalTerms.from_tag(text) == LONGEST


@pytest.mark.parametrize("text", ["", "{}", '{"machines": "many"}', "[" * 1000])
def test_damaged_terms_are_refused(text: str) -> None:
    with pytest.raises(DamagedRecord, match="the tag imgnet:terms"):
        RentalTerms.from_tag(text)


def test_resume_of_an_adopted_job_keeps_its_place_and_its_limit_of_dollars() -> None:
    place = Place(region="us-east-1", zone="us-east-1b", type="m7i.2xlarge", market="on-demand", price=0.4)
    rental_spec = RentalSpec(
        places=(place,),
        ssh_address="203.0.113.7/32",
        owner="somebody",
        max_dollars=0.25,
        use_placement_group=False,
        internet=Internet.NAT,
    )
    options = adopted_options(rental_spec)
    assert options == AwsOptions(
        types=("m7i.2xlarge",),
        market="on-demand",
        regions=("us-east-1",),
        zones=("us-east-1b",),
        internet=Internet.NAT,
        use_placement_group=False,
        max_dollars=0.25,
    )
