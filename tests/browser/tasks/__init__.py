"""An operator's everyday tasks, one file each, with the most clicks and pages that each may take."""
