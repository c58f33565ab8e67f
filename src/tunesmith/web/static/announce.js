// What the page says in words, to eyes and to screen readers.
const status = document.getElementById("status");
const unsent = document.getElementById("unsent");
const progressText = document.getElementById("progress-text");
const progressBar = document.getElementById("done");

export function say(text, isBad = false) {
  status.textContent = text;
  status.classList.toggle("bad", isBad);
}

/** Tell that `count` actions wait to be sent; 0 takes the notice away. */
export function sayUnsent(count) {
  unsent.hidden = count === 0;
  unsent.textContent = count
    ? `The server cannot be reached. ${count === 1 ? "One action is" : `${count} actions are`} kept here and sent as soon as it answers.`
    : "";
}

export function showProgress(progress) {
  const votes = progress.num_votes === 1 ? "1 vote" : `${progress.num_votes} votes`;
  const limit = progress.max_votes ? ` of ${progress.max_votes}` : "";
  progressText.textContent = `${votes}${limit} · ${progress.num_left} left`;
  progressBar.max = Math.max(1, progress.num_votes + progress.num_left);
  progressBar.value = progress.num_votes;
}
