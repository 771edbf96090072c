"""How the commands of one job find and connect to one another: the launch environment and the rendezvous."""
