"""What EC2 offers and what it costs: instance types, zones, prices, quotas, and the bill of a job."""
