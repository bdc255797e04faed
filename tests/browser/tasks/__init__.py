"""An operator's daily tasks, one file each, with the most actions that each may take from the app's home page."""
