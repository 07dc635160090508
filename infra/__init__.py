"""Renting machines: what all clouds share, and `aws`, which alone imports boto3. Knows nothing of training."""
