"""What the documentation site is made of besides the pages that people write."""
