"use strict";
// Optional: copy buttons, values under the charts on hover, and unfolding for printing. The page is readable without it.
for (const button of document.querySelectorAll("button.copy")) {
  if (!navigator.clipboard && !document.execCommand) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    const words = button.firstChild;
    let copied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Without a clipboard for pages opened as files (some browsers): select the text and use the older API.
      const selection = getSelection();
      selection.selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    words.textContent = copied ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => (words.textContent = "Copy"), 2000);
  });
}
for (const figure of document.querySelectorAll("figure")) {
  const line = figure.querySelector(".readout");
  if (!line) continue;
  const show = (event) => {
    const title = event.target.querySelector?.(":scope > title");
    if (title && event.target.tagName !== "svg") line.textContent = title.textContent;
  };
  figure.addEventListener("pointerover", show);
  figure.addEventListener("pointerdown", show);
}
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("article details:not([open]), details.flames:not([open])")];
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => {
  for (const fold of opened) fold.open = false;
});
