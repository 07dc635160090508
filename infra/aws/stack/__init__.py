"""The stack: long-lived AWS resources of a region, such as the VPC, the security group, EFS, key pairs and the role."""
