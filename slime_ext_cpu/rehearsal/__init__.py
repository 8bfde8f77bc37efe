"""What two small rollouts of a launch script show."""
