"""What is called at fixed moments of a run: one file for each callback that ddpexp brings. Free of torch until used."""
