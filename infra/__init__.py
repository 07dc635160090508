"""Renting machines: errors, costs and offers, and `aws`, which alone imports boto3. Knows nothing of training."""
