"""The plan of a launch on EC2: places, prices and traffic, before anything is rented."""
