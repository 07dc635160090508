"""The machines of one job: renting, replacing and ending them, and adopting them from another computer."""
