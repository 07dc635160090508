"""The EC2 instances of a job: image, launch request, gang launch, user data, termination, and the checks before."""
