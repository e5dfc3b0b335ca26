// On touch screens a drag on a chart scrolls the page; with a mouse it zooms.
if (matchMedia("(pointer: fine)").matches)
  document.querySelectorAll(".js-plotly-plot").forEach(plot => {
    if (plot.layout.dragmode === false) Plotly.relayout(plot, {dragmode: "zoom"});
  });
