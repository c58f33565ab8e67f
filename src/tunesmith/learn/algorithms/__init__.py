"""Pure tensor functions: advantages, KL, policy, value and preference losses. Masks and denominators are given."""
