"""How the commands of one job find one another and agree on who does what."""
