"""Jobs on a real GPU, and what ddpdoctor says about them."""
